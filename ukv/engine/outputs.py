"""From what the device drew to what the user sees."""

import numpy as np

from ukv.engine.request import FinishReason, RequestOutput
from ukv.engine.sequence import Sequence


def accept(sequence: Sequence, drawn: np.ndarray) -> RequestOutput:
    """Add the tokens that a row drew to its sequence, up to the one that ends it.

    Args:
      sequence: Whose they are.
      drawn: int32 ``[passes, 4]``, as ``StepResults.drawn``.
    """
    params = sequence.request.params
    tokens, logprobs, reason, error = [], [], None, None
    for token, bits, is_stop, is_finite in drawn.tolist():
        if not is_finite:
            reason = FinishReason.ERROR
            place = len(sequence.generated) + len(tokens)
            error = f"the logits of output {place} are not finite numbers"
            break
        tokens.append(token)
        logprobs.append(float(np.int32(bits).view(np.float32)))
        if is_stop:
            reason = FinishReason.STOP
            break
        if len(sequence.generated) + len(tokens) == params.max_new_tokens:
            reason = FinishReason.LENGTH
            break
    scores = sequence.prompt_scores
    is_first = not sequence.generated
    sequence.generated += tokens
    return RequestOutput(
        request_id=sequence.request.request_id,
        new_tokens=tuple(tokens),
        new_logprobs=tuple(logprobs) if params.logprobs else (),
        prompt_scores=tuple(scores[i] for i in sorted(scores)) if is_first else (),
        finish_reason=reason,
        error=error,
    )
