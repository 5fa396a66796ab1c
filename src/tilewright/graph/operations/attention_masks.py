"""Which keys a query may attend: the mask attributes that all attention operations share.

With row and col counted from the diagonal's corner, a left bound L hides ``col <= row - L`` and a
right bound R hides ``col > row + R``. docs/operations/attention.md draws them.
"""

from __future__ import annotations

from tilewright.graph import enums
from tilewright.graph.operation import Operation
from tilewright.records import record


@record(frozen=True, kw_only=True, eq=False)
class AttentionMasks(Operation):
    """The mask attributes as the user gave them, and the one band that they mean.

    Engines read ``left_bound``, ``right_bound`` and ``alignment``; the attributes keep the
    user's spelling for the JSON form.
    """

    use_alibi_mask: bool = False
    use_padding_mask: bool = False
    use_causal_mask: bool = False
    use_causal_mask_bottom_right: bool = False
    sliding_window_length: int | None = None
    diagonal_alignment: enums.diagonal_alignment = enums.diagonal_alignment.TOP_LEFT
    diagonal_band_left_bound: int | None = None
    diagonal_band_right_bound: int | None = None

    @property
    def left_bound(self) -> int | None:
        """L of the rule that hides ``col <= row - L``, at least 1; None hides nothing."""
        if self.diagonal_band_left_bound is not None:
            return self.diagonal_band_left_bound
        return self.sliding_window_length

    @property
    def right_bound(self) -> int | None:
        """R of the rule that hides ``col > row + R``, at least 0; None hides nothing.

        One row with its diagonal at the bottom right, the newest token's, sees all keys.
        """
        is_bottom_right = self.alignment is enums.diagonal_alignment.BOTTOM_RIGHT
        if is_bottom_right and self.inputs["q"].dim[2:3] == (1,):
            return None
        if self.use_causal_mask or self.use_causal_mask_bottom_right:
            return 0
        return self.diagonal_band_right_bound

    @property
    def alignment(self) -> enums.diagonal_alignment:
        """The corner that the diagonal runs through; BOTTOM_RIGHT adds S_kv - S_q to each row."""
        if self.use_causal_mask_bottom_right:
            return enums.diagonal_alignment.BOTTOM_RIGHT
        return self.diagonal_alignment

    @property
    def is_banded(self) -> bool:
        """True if the band hides any key at all."""
        return self.left_bound is not None or self.right_bound is not None

    def check_masks(self) -> None:
        """No bound is out of range, and none is said in two ways.

        Raises:
            GraphError: naming both attributes, and what the two would mean together.
        """
        self._check_causal()
        window, left = self.sliding_window_length, self.diagonal_band_left_bound
        if window is not None and left is not None:
            self.fail(
                f"sliding_window_length is {window} and the left bound is {left}; "
                "expected one of them: a sliding window is the left bound"
            )
        for attribute, value in (("sliding_window_length", window), ("left bound", left)):
            if value is not None and value < 1:
                self.fail(
                    f"{attribute} is {value}; expected at least 1: a left bound L hides "
                    "col <= row - L, so that 1 leaves the diagonal itself"
                )
        right = self.diagonal_band_right_bound
        if right is not None and right < 0:
            self.fail(
                f"right bound is {right}; expected at least 0: a right bound R hides col > row + R"
            )

    def _check_causal(self) -> None:
        causal, bottom = self.use_causal_mask, self.use_causal_mask_bottom_right
        if causal and bottom:
            self.fail(
                "use_causal_mask and use_causal_mask_bottom_right are both True; expected one of "
                "them: the diagonal runs through one corner"
            )
        if not (causal or bottom):
            return
        attribute = "use_causal_mask" if causal else "use_causal_mask_bottom_right"
        if self.diagonal_band_right_bound is not None:
            self.fail(
                f"{attribute} is True and the right bound is {self.diagonal_band_right_bound}; "
                "expected one of them: causal is the right bound 0"
            )
        if causal and self.diagonal_alignment is enums.diagonal_alignment.BOTTOM_RIGHT:
            self.fail(
                "use_causal_mask is True and diagonal_alignment is BOTTOM_RIGHT; expected "
                "use_causal_mask_bottom_right, or BOTTOM_RIGHT with the right bound 0: "
                "use_causal_mask is the top-left diagonal"
            )
