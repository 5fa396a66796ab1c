"""Which of racecheck's reports are of the words that tell warps their partition."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.L0

SCRIPT = Path(__file__).resolve().parents[3] / "gpu/partition_words.py"
WARPS, SHARED_BYTES = 12, 0x340A8
# After Triton 3.6's code for SM90 of a kernel with eight warps beside the first four.
CODE = """
.L_x_11:
        /*00e0*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*0100*/                   IMAD.U32 R4, RZ, RZ, UR7 ;
        /*0110*/                   LDS.U8 R4, [R4+UR5+0x3409c] ;
        /*0130*/               @P0 BRA `(.L_x_1) ;
        /*4780*/                   STS.U8 [R4+0x30000], R25 ;
        /*4960*/                   LDS.U8 R28, [R5+0x30000] ;
        /*b420*/              @!UP6 SYNCS.EXCH.64 URZ, [UR7+0x34098], UR8 ;
        /*b430*/                   BAR.SYNC.DEFER_BLOCKING 0x0, 0x80 ;
        /*b440*/                   STS.64 [UR7+0x340a0], R2 ;
        /*b450*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
.L_x_21:
        /*c390*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*c430*/                   STS.64 [UR4+0x340a0], R2 ;
        /*c440*/                   BAR.SYNC.DEFER_BLOCKING 0x1 ;
        /*c450*/                   EXIT ;
"""
WORDS = {0x110, 0xB440, 0xC430}
OUTPUT = """========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at forward+0x110 in kernel.py:234
=========     and Write access at forward+0xb440 in kernel.py:234 [34 hazards]
=========     and Write access at forward+0xc430 in kernel.py:284 [9 hazards]
========= \n\
partition words: {"forward": [272, 46144, 50224], "repair": []}
ran on triton
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
DATA = """========= Error: Race reported between Write access at forward+0x4780 in kernel.py:43
=========     and Read access at forward+0x4960 in kernel.py:51 [512 hazards]
========= \n"""


@pytest.fixture(scope="module")
def words() -> ModuleType:
    spec = importlib.util.spec_from_file_location("partition_words", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_words_are_the_last_bytes_behind_a_barrier_of_the_block(words: ModuleType) -> None:
    assert words.word_accesses(CODE, WARPS, SHARED_BYTES) == WORDS


@pytest.mark.parametrize(
    ("old", "new", "lost"),
    [
        ("/*b450*/                   BAR.SYNC.DEFER_BLOCKING 0x1", "/*b450*/   NOP", {0xB440}),
        ("BAR.SYNC.DEFER_BLOCKING 0x1 ;\n.L_x_21", "BAR.SYNC.DEFER_BLOCKING 0x2 ;\n.L_x_21",
         {0xB440}),
        ("/*c440*/                   BAR.SYNC.DEFER_BLOCKING 0x1",
         "/*c440*/                   BAR.SYNC.DEFER_BLOCKING 0x1, 0x80", {0xC430}),
        ("/*c440*/                   BAR.SYNC", "/*c440*/               @P0 BAR.SYNC", {0xC430}),
        ("        /*c440*/", ".L_x_22:\n        /*c440*/", {0xC430}),
        ("/*c440*/", "/*c438*/  @P1 BRA `(.L_x_11) ;\n  /*c440*/", {0xC430}),
        # Without a barrier before the read nothing is in order.
        ("/*00e0*/                   BAR.SYNC.DEFER_BLOCKING 0x1", "/*00e0*/   NOP", WORDS),
        ("+0x3409c]", "+0x34000]", WORDS),
        ("[UR4+0x340a0]", "[UR4+0x34000]", {0xC430}),
    ],
)  # fmt: skip
def test_other_accesses_are_none(words: ModuleType, old: str, new: str, lost: set[int]) -> None:
    assert old in CODE
    code = CODE.replace(old, new)
    assert words.word_accesses(code, WARPS, SHARED_BYTES) == WORDS - lost


def test_a_kernel_whose_warps_are_not_dealt_has_none(words: ModuleType) -> None:
    assert words.word_accesses(CODE, 4, 0xC000) == set()


def test_a_report_of_words_alone_is_told_apart(words: ModuleType) -> None:
    assert words.reports_by_kind(OUTPUT) == {"partition words": 1, "other": 0}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # One access of another place, in the same report.
        ("forward+0xc430", "forward+0x4780"),
        ("forward+0x110", "repair+0x110"),
        ("forward+0x110", "stranger+0x110"),
        # The run did not come to its end.
        ("partition words", "no words"),
        # Reports that are not printed.
        ("1 hazard displayed", "101 hazards displayed"),
        ("1 hazard displayed", "nothing displayed"),
    ],
)
def test_any_doubt_makes_another_report(words: ModuleType, old: str, new: str) -> None:
    assert old in OUTPUT
    assert words.reports_by_kind(OUTPUT.replace(old, new))["other"] >= 1


def test_a_race_on_data_beside_is_another_report(words: ModuleType) -> None:
    output = DATA + OUTPUT.replace("1 hazard displayed", "2 hazards displayed")
    assert words.reports_by_kind(output) == {"partition words": 1, "other": 1}
