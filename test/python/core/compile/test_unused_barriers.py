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
WAIT = "	mbarrier.try_wait.parity.shared.b64 complete, [{}], %r90;\n"
ARRIVAL = "	@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [{}], 16384;\n"

# The beginning of packed attention, as Triton 3.6.0 makes it for sm_90.
BEGINNING = """
	mov.b32 	%r1631, global_smem;
	add.s32 	%r1623, %r1631, 212992;
	@%p55 mbarrier.init.shared::cta.b64 [%r1623], 1;
	add.s32 	%r1624, %r1631, 213000;
	@%p55 mbarrier.init.shared::cta.b64 [%r1624], 1;
	add.s32 	%r1625, %r1631, 213008;
	@%p55 mbarrier.init.shared::cta.b64 [%r1625], 1;
	add.s32 	%r1626, %r1631, 213016;
	@%p55 mbarrier.init.shared::cta.b64 [%r1626], 1;
	add.s32 	%r1627, %r1631, 213024;
	@%p55 mbarrier.init.shared::cta.b64 [%r1627], 1;
	add.s32 	%r1628, %r1631, 213032;
	@%p55 mbarrier.init.shared::cta.b64 [%r1628], 1;
	add.s32 	%r1629, %r1631, 213040;
	@%p55 mbarrier.init.shared::cta.b64 [%r1629], 1;
	add.s32 	%r1630, %r1631, 213048;
	@%p55 mbarrier.init.shared::cta.b64 [%r1630], 1;
	@%p55 mbarrier.init.shared::cta.b64 [%r1631], 1;
	add.s32 	%r1632, %r1631, 213056;
	@%p55 mbarrier.init.shared::cta.b64 [%r1632], 128;
	add.s32 	%r1633, %r1631, 8;
	@%p55 mbarrier.init.shared::cta.b64 [%r1633], 1;
	add.s32 	%r1634, %r1631, 213064;
	@%p55 mbarrier.init.shared::cta.b64 [%r1634], 128;
	@%p55 mbarrier.init.shared::cta.b64 [%r1631], 1;
	add.s32 	%r1635, %r1631, 213072;
	@%p55 mbarrier.init.shared::cta.b64 [%r1635], 128;
	@%p55 mbarrier.init.shared::cta.b64 [%r1633], 1;
	add.s32 	%r1636, %r1631, 213080;
	@%p55 mbarrier.init.shared::cta.b64 [%r1636], 128;
	@%p55 mbarrier.init.shared::cta.b64 [%r1631], 1;
	add.s32 	%r1637, %r1631, 213088;
	@%p55 mbarrier.init.shared::cta.b64 [%r1637], 128;
	@%p55 mbarrier.init.shared::cta.b64 [%r1633], 1;
	add.s32 	%r1638, %r1631, 213096;
	@%p55 mbarrier.init.shared::cta.b64 [%r1638], 128;
	@%p55 mbarrier.init.shared::cta.b64 [%r1631], 1;
	add.s32 	%r1639, %r1631, 213104;
	@%p55 mbarrier.init.shared::cta.b64 [%r1639], 128;
	@%p55 mbarrier.init.shared::cta.b64 [%r1633], 1;
	add.s32 	%r1640, %r1631, 213112;
	@%p55 mbarrier.init.shared::cta.b64 [%r1640], 128;
	@%p55 mbarrier.init.shared::cta.b64 [%r1631], 1;
	add.s32 	%r1641, %r1631, 213120;
	@%p55 mbarrier.init.shared::cta.b64 [%r1641], 128;
	@%p55 mbarrier.init.shared::cta.b64 [%r1633], 1;
	add.s32 	%r1642, %r1631, 213128;
	@%p55 mbarrier.init.shared::cta.b64 [%r1642], 128;
	@%p55 mbarrier.init.shared::cta.b64 [%r1631], 1;
	add.s32 	%r1643, %r1631, 213136;
	@%p55 mbarrier.init.shared::cta.b64 [%r1643], 128;
	@%p55 mbarrier.init.shared::cta.b64 [%r1633], 1;
	add.s32 	%r1644, %r1631, 213144;
	@%p55 mbarrier.init.shared::cta.b64 [%r1644], 128;
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
        # The second one is waited for.
        made("%r10") + made("%r10", 128) + WAIT.format("%r10") + ended("%r10"),
        made("%r13") + made("%r14", 128) + WAIT.format("%r14"),
        made("%r10") + made("%r10") + ARRIVAL.format("%r10"),
        # Where an address is not known nothing is told of it.
        made("%r90") + made("%r91"),
    ],
    ids=["none", "each once", "in turn", "ended", "waited for", "arrived at", "elsewhere"],
)
def test_other_text_is_left_as_it_is(barriers: str) -> None:
    ptx = ADDRESSES + barriers + "	ret;\n"
    assert without_unused_barriers(ptx) is ptx


def test_what_triton_makes_has_two_addresses_of_no_use() -> None:
    text = without_unused_barriers(BEGINNING)
    gone = [line for line in BEGINNING.splitlines() if line not in text.splitlines()]
    assert set(gone) == {
        made("%r1631")[:-1].replace("%p1", "%p55"),
        made("%r1633")[:-1].replace("%p1", "%p55"),
    }
    assert text.count("mbarrier.init") == BEGINNING.count("mbarrier.init") - 12
