"""The figures of README."""

from __future__ import annotations

from decimal import Decimal

from figures_reading import (
    decode,
    geometric_mean,
    numbers,
    ropes,
    row,
    rows,
    span,
    table,
    wrapped,
)

# Of FP8, what is told apart: longer sequences.
_FROM_KEYS = 2048
# A share of a copy's rate that is as good as the whole.
_NEAR = Decimal("0.95")


def summary() -> str:
    """README: what was measured, subject by subject."""
    lines = {
        "attention forward, head sizes 64, 128, 256, lengths 512 to 16384, causal and not": (
            _hopper_forward(),
            "`hopper.csv`",
        ),
        "attention backward, head sizes 64, 128 and 256, 2048 to 16384": (
            _hopper_backward(),
            "`attention_backward.csv`",
        ),
        "packed sequences with a heavy tail, 64k tokens, causal": (
            _hopper_packed(),
            "`hopper.csv`",
        ),
        "the `triton` engine's attention, head sizes 64, 128, 256, 2048 to 16384": (
            _triton_attention(),
            "`attention.csv`, `attention_backward.csv`",
        ),
        "decoding, 8 sequences of 4096 and 32768 keys, 32 query heads on 8": (
            _decoding(),
            "`attention.csv`",
        ),
        "FP8 forward, head size 128, 8192, full and causal": (_fp8(), "`hopper_fp8.csv`"),
        "RMSNorm and LayerNorm, 16384 rows of 1024 to 16384": (_norms(), "`torch.csv`"),
        "RoPE; a chain of seven pointwise operations": (
            _elementwise(),
            "`rope.csv`, `pointwise.csv`",
        ),
        # The file is of a call that did not yet ask how long each operand's storage is.
        "host time of a call of three operands, every check but of a storage's length included": (
            _host(),
            "`launch.csv`",
        ),
        "first norm of a process whose kernels are stored": (_first_norm(), "`artifacts.csv`"),
    }
    return table(("what", "measured", "file"), ((what, *told) for what, told in lines.items()))


def _hopper_forward() -> str:
    grid = rows("hopper", case="grid")
    over = {peer: numbers(grid, f"over_{peer}") for peer in ("cudnn", "cute")}
    means = {peer: f"{geometric_mean(values):.2f}" for peer, values in over.items()}
    least = min(min(pair) for pair in zip(*over.values(), strict=True))
    full, causal = (
        row("hopper", case="grid", head_size="128", length="8192", mask=mask)["hopper"]
        for mask in ("full", "causal")
    )
    return (
        f"{means['cudnn']} times cuDNN and {means['cute']} times FA-cute in the geometric mean, "
        f"{least:.2f} times the better of them in the least case; {full} and {causal} TFLOP/s at "
        "128, 8192"
    )


def _hopper_backward() -> str:
    quick = rows("attention_backward", who="tilewright hopper quick")
    long = [each for each in quick if each["length"] == "8192"]
    fixed = rows("attention_backward", who="tilewright hopper fixed")
    return (
        f"{span(numbers(quick, 'of_cudnn'))} times cuDNN, {span(numbers(quick, 'of_cute'))} times "
        f"FA-cute (at 8192 {span(numbers(long, 'of_cute'))}), "
        f"{span(numbers(quick, 'of_flash'))} times PyTorch's flash; in a fixed order, at 128 and "
        f"256, {span(numbers(fixed, 'of_cudnn'))} times cuDNN"
    )


def _hopper_packed() -> str:
    packed = row("hopper", case="packed, heavy tail")
    flash, cudnn, cute = (Decimal(packed[f"over_{peer}"]) for peer in ("flash", "cudnn", "cute"))
    return (
        f"{flash:.2f} times PyTorch's packed flash, {cudnn:.2f} times cuDNN, {cute:.2f} times "
        "FA-cute"
    )


def _triton_attention() -> str:
    forward = rows("attention", kind="dense", who="tilewright triton")
    backward = rows("attention_backward", who="tilewright triton quick")
    depths = (
        span(numbers((each for each in backward if each["depth"] == depth), "of_cudnn"))
        for depth in ("64", "128", "256")
    )
    window = row("attention", kind="window", mask="window 1024", who="tilewright triton")
    return (
        f"forward {span(numbers(forward, 'of_cudnn'))} times cuDNN; "
        f"backward at {span(numbers(backward, 'length'), 0)} {', '.join(depths)}; "
        f"a window of 1024 keys of 16384 takes {window['of_visible']} times "
        "its share of the causal time"
    )


def _decoding() -> str:
    short, long = (decode(length, "even") for length in ("4096", "32768"))
    pages = [
        Decimal(decode(length, f"even, page {size}")["ms"]) / Decimal(decode(length, "even")["ms"])
        for length in ("4096", "32768")
        for size in (16, 128)
    ]
    least, most = (f"{(pick(pages) - 1) * 100:.0f}" for pick in (min, max))
    return (
        f"{short['of_cudnn']} and {long['of_cudnn']} times cuDNN; {long['of_copy']} of the copy "
        f"rate at 32768; pages cost {least} to {most} percent"
    )


def _fp8() -> str:
    full, causal = (
        row("hopper_fp8", head_size="128", length="8192", mask=mask) for mask in ("full", "causal")
    )
    over = {
        column: " and ".join(f"{Decimal(each[column]):.2f}" for each in (full, causal))
        for column in ("over_bf16", "over_cudnn")
    }
    return (
        f"{full['fp8']} and {causal['fp8']} TFLOP/s, {over['over_bf16']} times our bfloat16, "
        f"{over['over_cudnn']} times cuDNN's FP8"
    )


def _norms() -> str:
    ours = [each for each in rows("torch") if each["subject"].startswith("tilewright")]
    forward = [each for each in ours if "backward" not in each["subject"]]
    backward = [each for each in ours if "backward" in each["subject"]]
    return (
        f"{span(numbers(forward, 'of_copy'), 3)} of the copy rate; "
        f"{span(numbers(forward, 'speed_over_torch'))} times PyTorch; backward "
        f"{span(numbers(backward, 'speed_over_torch'))} times"
    )


def _elementwise() -> str:
    chain = Decimal(row("pointwise", graph="seven operations", subject="tilewright")["of_copy"])
    return f"{span(ropes())}, and {chain:.2f}, of the copy rate"


def _host() -> str:
    execute = row("launch", subject="graph.execute")
    peers = [
        Decimal(row("launch", subject=subject)["host_us"])
        for subject in ("cuDNN front end, rmsnorm", "torch rms_norm")
    ]
    return (
        f"{Decimal(execute['host_us']):.1f} microseconds, {execute['ratio_to_bare']} times a bare "
        f"launch; cuDNN's Python front end {peers[0]:.1f}, PyTorch's `rms_norm` {peers[1]:.1f}"
    )


def _first_norm() -> str:
    total = row("artifacts", step="total")
    usual, least, most = (
        f"{Decimal(total[column]):.0f}" for column in ("from_store_ms", "least_ms", "most_ms")
    )
    return f"{usual} milliseconds after torch's import ({least} to {most}), without Triton"


def behind() -> str:
    """README: where a peer is ahead; what is not behind any more is not told."""
    narrow = [
        each
        for depth in ("64", "128")
        for each in rows(
            "attention_backward", depth=depth, length="2048", who="tilewright hopper quick"
        )
    ]
    wide = [
        each for each in rows("hopper_fp8", head_size="128") if int(each["length"]) >= _FROM_KEYS
    ]
    short = Decimal(row("hopper_fp8", head_size="64", length="512", mask="causal")["over_bf16"])
    uneven = Decimal(decode("32768", "uneven")["of_copy"])
    quarter = Decimal(decode("32768", "quarter")["of_cudnn"])
    packed = rows("attention", kind="ragged", who="tilewright triton")
    over_cute, over_cudnn = numbers(narrow, "of_cute"), numbers(wide, "over_cudnn")
    of_packed = numbers(packed, "of_cudnn")
    clauses = [
        (min(over_cute), 1, "backward of head sizes 64 and 128 at 2048 ({} times FA-cute)"),
        (min(over_cudnn), 1, "FP8 at head size 128 from 2048 keys on ({} times cuDNN's)"),
        (short, 1, "FP8 at head size 64, causal and short ({} times our bfloat16 at 512)"),
        (uneven, _NEAR, "decoding of uneven lengths ({} of the copy rate at 32768)"),
        (quarter, 1, "decoding where a quarter of 32768 declared keys is there ({} times cuDNN)"),
        (min(of_packed), 1, "packed attention in `triton` ({} times cuDNN)"),
    ]
    figures = map(span, (over_cute, over_cudnn, [short], [uneven], [quarter], of_packed))
    told = [
        text.format(figure)
        for (found, wanted, text), figure in zip(clauses, figures, strict=True)
        if found < wanted
    ]
    last = told.pop() if told else "nothing that was measured"
    return wrapped(f"Behind so far: {', '.join(told)}{', and ' if told else ''}{last}.")
