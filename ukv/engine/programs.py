"""The compiled programs of an engine: made once, chosen by size."""

from ukv.engine.config import EngineConfig
from ukv.engine.model import Model
from ukv.engine.op_sets import require_one_translator
from ukv.engine.plan import StepPlan
from ukv.engine.step import StepShape, make_step
from ukv.layout import PoolLayout
from ukv.translator import Bucket, KVIndexTranslator


class Programs:
    """Programs of one model, layout and config.

    They hold no buffers, so engines of the same three may share them.

    Attributes:
      translator: The one translator that every step uses.
    """

    def __init__(
        self,
        model: Model,
        layout: PoolLayout,
        config: EngineConfig,
        *,
        translator: KVIndexTranslator | None = None,
    ) -> None:
        """Describe the programs; each is compiled at its first use.

        Args:
          model: The model.
          layout: Of the pool.
          config: Sizes.
          translator: For a model that carries one; None for a new one.

        Raises:
          SpecError: The model carries another translator.
        """
        self.translator = translator or KVIndexTranslator(layout)
        require_one_translator(model, self.translator)
        self.model = model
        self.config = config
        self.shapes = tuple(
            StepShape(
                bucket=Bucket(
                    num_rows=size if is_decode else config.max_rows,
                    max_pages=config.max_pages,
                    num_tokens=size,
                ),
                num_passes=config.decode_steps if is_decode else None,
                scores_tokens=config.scores_prompts and not is_decode,
            )
            for is_decode, sizes in (
                (True, config.decode_sizes),
                (False, config.prefill_sizes),
            )
            for size in sizes
        )
        self.steps = {
            shape: make_step(model, self.translator, shape) for shape in self.shapes
        }

    def serve(self, model: Model, layout: PoolLayout, config: EngineConfig) -> bool:
        """Return whether these are programs of this model, layout and config."""
        built_for = (self.model, self.translator.layout, self.config)
        return built_for == (model, layout, config)

    def shape_of(self, plan: StepPlan) -> StepShape:
        """Return the smallest shape that holds a plan's chunks."""
        size = (
            len(plan.chunks)
            if plan.is_decode
            else sum(chunk.query_len for chunk in plan.chunks)
        )
        return next(
            shape
            for shape in self.shapes
            if shape.is_decode == plan.is_decode and shape.bucket.num_tokens >= size
        )
