"""Machine code of Hopper kernels, as nvdisasm writes it: registers of a running product must not be touched.

wgmma works beside the threads: its sums, and a left operand in registers, belong to it until a thread has waited for
it. ptxas keeps that order where it sees it, and once did not: it moved what read the sums of a loop's last product
before the wait behind the loop.
"""

import functools
import re
import shutil
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path

_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(.*?)\s*;", re.MULTILINE)
_PRODUCT = re.compile(r"[HIQ]GMMA\.64x(\d+)x\d+(?:\.SP)?\.?(\w*)\S* R(\d+), (?:(R)(\d+)|gdesc)")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)")
_REGISTER = re.compile(r"\bR(\d+)(\.64)?\b")
_STORES = ("ST", "SYNCS", "RED", "ATOM", "BAR", "UBLKCP")


@functools.cache
def nvdisasm() -> str | None:
    """The program, of the package ``nvidia-cuda-nvdisasm`` or of a toolkit; None where there is none."""
    try:
        files = metadata.files("nvidia-cuda-nvdisasm") or []
    except metadata.PackageNotFoundError:
        files = []
    paths = [str(Path(str(file.locate()))) for file in files if file.name == "nvdisasm"]
    return paths[0] if paths else shutil.which("nvdisasm")


def disassembled(code: bytes) -> str:
    """A cubin's instructions; needs `nvdisasm`."""
    program = nvdisasm()
    assert program is not None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        return subprocess.run([program, "-c", file.name], capture_output=True, text=True, check=True).stdout


def touched_too_early(text: str) -> list[str]:
    """Instructions that read or write sums, or write left operands, of products that have not been waited for.

    Instructions are taken in the order of their addresses, so a product that is begun at a loop's end and not waited
    for at its beginning is not followed there, but behind the loop.
    """
    begun: list[tuple[set[int], set[int]]] = []  # sums and left operands of groups, the newest last
    sums: set[int] = set()
    left: set[int] = set()
    early = []
    for instruction in _INSTRUCTION.findall(text):
        if product := _PRODUCT.search(instruction):
            columns, kind, first = int(product[1]), product[2], int(product[3])
            sums |= set(range(first, first + columns // (4 if kind == "F16" else 2)))
            left |= set(range(int(product[5]), int(product[5]) + 4)) if product[4] else set()
            if "gsb0" in instruction:
                begun.append((sums, left))
                sums, left = set(), set()
        elif wait := _WAIT.search(instruction):
            pending = int(wait[1], 16)
            begun = begun[len(begun) - pending :] if pending else []
        elif not instruction.startswith("WARPGROUP"):
            bare = re.sub(r"^@!?U?P\w+ ", "", instruction)
            registers = [int(number) + i for number, wide in _REGISTER.findall(bare) for i in range(2 if wide else 1)]
            target = set() if bare.startswith(_STORES) else set(registers[:1])
            for sums_of_wait, lefts in [*begun, (sums, left)]:
                if sums_of_wait.intersection(registers) or lefts & target:
                    early.append(instruction)
                    break
    return early
