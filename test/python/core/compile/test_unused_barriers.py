"""Barriers that a compiler made for nobody are taken out of PTX, and no others."""

from __future__ import annotations

import pytest

from tilewright.engines.compiled.unused_barriers import without_unused_barriers

pytestmark = pytest.mark.L0

ADDRESSES = """
	mov.b32 	%r10, global_smem;
	add.s32 	%r11, %r10, 8;
	add.s32 	%r12, %r10, 4096;
	add.s32 	%r13, %r12, 8;
	add.s32 	%r14, %r10, 4104;
"""


def made(register: str, count: int = 1) -> str:
    return f"	@%p1 mbarrier.init.shared::cta.b64 [{register}], {count};\n"


def ended(register: str) -> str:
    return f"	@%p1 mbarrier.inval.shared::cta.b64 [{register}];\n"


def test_what_is_initialised_again_and_was_not_invalidated_is_of_no_use() -> None:
    used = made("%r12", 128) + "	bar.sync 0, 128;\n" + made("%r13")
    unused = made("%r10") + made("%r11")
    ptx = ADDRESSES + unused + used + unused + "	bra.uni $L__BB0_1;\n"
    assert without_unused_barriers(ptx) == ADDRESSES + used + "	bra.uni $L__BB0_1;\n"


def test_an_address_is_known_by_its_offset_and_not_by_its_register() -> None:
    ptx = ADDRESSES + made("%r13") + made("%r14") + made("%r12")
    assert without_unused_barriers(ptx) == ADDRESSES + made("%r12")


@pytest.mark.parametrize(
    "barriers",
    [
        "",
        made("%r10") + made("%r11") + made("%r12"),
        # Loops that take the same memory one after the other.
        made("%r10") + ended("%r10") + made("%r10", 2) + ended("%r10"),
        # Where an address is not known nothing is told of it.
        made("%r90") + made("%r91"),
    ],
    ids=["none", "each once", "in turn", "elsewhere"],
)
def test_other_text_is_left_as_it_is(barriers: str) -> None:
    ptx = ADDRESSES + barriers + "	ret;\n"
    assert without_unused_barriers(ptx) is ptx
