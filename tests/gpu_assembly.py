"""What assemblers make of a kernel's PTX for an H200, and how safe it is.

The sums of a warpgroup's products (`HGMMA`) are written long after the instruction, and
so are its left operands read. Nothing but the wait for them (`WARPGROUP.DEPBAR`) keeps
other instructions away: no scoreboard does, and assemblers have been seen to get it
wrong where a branch comes in between.
"""

import collections
import dataclasses
import importlib.util
import pathlib
import re
import subprocess
import tempfile

import triton

TOOLS = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin"
PTXAS = TOOLS / "ptxas"

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(?P<text>.*?) *;")
_LABEL = re.compile(r"^\.L_\w+:")
_REGISTER = re.compile(r"\bR(?P<number>\d+)(?P<wide>\.64)?")
_PRODUCT = re.compile(
    r"HGMMA\.64x(?P<columns>\d+)\S* R(?P<sums>\d+), (R(?P<left>\d+)|gdesc\S+),"
)
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, (?P<running>0x[0-9a-f]+)")
_ADDRESS = re.compile(r"\[[^\]]*\]")


@dataclasses.dataclass(frozen=True)
class Assembled:
    """Machine code, and what the assembler had to say about it."""

    cubin: bytes
    log: str

    @property
    def spilled_bytes(self) -> int:
        """Bytes of registers that are stored to memory and loaded again."""
        found = re.findall(r"(\d+) bytes spill (?:stores|loads)", self.log)
        assert found
        return sum(map(int, found))


def assemblers() -> dict[str, pathlib.Path]:
    """Return Triton's assembler and the one that XLA takes, if they are there."""
    found = {"triton": PTXAS}
    package = importlib.util.find_spec("nvidia.cuda_nvcc")
    for folder in package.submodule_search_locations if package else ():
        found["xla"] = pathlib.Path(folder) / "bin/ptxas"
    return {name: path for name, path in found.items() if path.is_file()}


def assemble(ptx: str, ptxas: pathlib.Path = PTXAS) -> Assembled:
    """Assemble a program."""
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder) / "kernel.ptx"
        cubin = pathlib.Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        command = [ptxas, "-v", "--gpu-name=sm_90a", source, "-o", cubin]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return Assembled(cubin.read_bytes(), done.stdout + done.stderr)


def listing(cubin: bytes) -> list[str]:
    """Return the instructions without their predicates, and the labels between."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / "nvdisasm", "-c", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = []
    for line in done.stdout.splitlines():
        if found := _INSTRUCTION.match(line):
            lines.append(found["text"])
        elif found := _LABEL.match(line):
            lines.append(found[0])
    return lines


def from_first_product_to_last_wait(lines: list[str]) -> list[str]:
    """Return the part of a listing in which products may run."""
    places = [i for i, x in enumerate(lines) if x.startswith(("HGMMA", "WARPGROUP.D"))]
    return lines[places[0] : places[-1] + 1]


def touched_while_products_run(lines: list[str]) -> list[str]:
    """Return what reads or writes sums of running products, or writes their operands.

    Args:
        lines: straight-line code.
    """
    groups = collections.deque([([], [])])
    found = []
    for line in lines:
        sums = {x for group in groups for x in group[0]}
        lefts = {x for group in groups for x in group[1]}
        if product := _PRODUCT.match(line):
            first, left = int(product["sums"]), product["left"]
            own = range(first, first + int(product["columns"]) // 2)
            # Or both operands are in shared memory.
            operand = range(int(left), int(left) + 4) if left else ()
            # It may add to sums that the one before it still writes: to all of them.
            if lefts & {*own} or sums & {*operand} or len(sums & {*own}) % len(own):
                found.append(line)
            groups[-1][0].extend(own)
            groups[-1][1].extend(operand)
            if "gsb0" in line:
                groups.append(([], []))
        elif wait := _WAIT.match(line):
            while len(groups) > int(wait["running"], 16) + 1:
                groups.popleft()
        else:
            written, touched = _registers(line)
            if sums & touched or lefts & written:
                found.append(line)
    return found


def _registers(line: str) -> tuple[set[int], set[int]]:
    """Return what an instruction writes, and all that it reads or writes."""
    name, _, operands = line.partition(" ")
    width = (
        4 if re.search(r"\.128|88\.4", name) else 2 if re.search("64|WIDE", name) else 1
    )
    touched, written = set(), set()
    for address in _ADDRESS.findall(operands):
        for x in _REGISTER.finditer(address):
            touched |= {int(x["number"]) + i for i in range(2 if x["wide"] else 1)}
    for x in _REGISTER.finditer(_ADDRESS.sub("", operands)):
        values = {int(x["number"]) + i for i in range(width)}
        touched |= values
        # The first is the result, but stores have none.
        if not written and not name.startswith(("ST", "LDGSTS")):
            written = values
    return written, touched


def loads_waited_for(lines: list[str]) -> list[str]:
    """Return the loads from global memory to registers whose result is read.

    Args:
        lines: straight-line code.
    """
    loads, waited = {}, []
    for line in lines:
        name, _, operands = line.partition(" ")
        first, _, others = operands.partition(",")
        result = _REGISTER.match(first)
        read = _REGISTER.findall(others if result else operands)
        for number in {int(number) for number, _ in read} & {*loads}:
            waited += [loads[number]] if loads[number] not in waited else []
        if result:
            written, _ = _registers(f"{name} {first}")
            loads = {x: load for x, load in loads.items() if x not in written}
            if name.startswith("LDG."):
                loads |= dict.fromkeys(written, line)
    return waited
