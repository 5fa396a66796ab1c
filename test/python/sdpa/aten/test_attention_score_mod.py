"""Score programs: soft cap, index masks, extra operands; their gradients given and derived."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.L0

FLOAT32 = 5e-6
CAP = 2.0
# Of these ATen has functions with out=, which autograd refuses, or that differ from the formula.
ACTIVATIONS = {
    "elu": torch.nn.functional.elu,
    "gelu": torch.nn.functional.gelu,
    "gelu_approx_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "leaky_relu": torch.nn.functional.leaky_relu,
    "relu": torch.relu,
    "softplus": lambda x: torch.log1p(torch.exp(x)),
    "swish": torch.nn.functional.silu,
}


def draw(seed: int, *shapes: tuple[int, ...]) -> list:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def problem(seed: int) -> list:
    return draw(seed, (2, 4, 9, 8), *[(2, 2, 300, 8)] * 2, (2, 4, 9, 8))


class Program:
    """A callback for the graph, and the same in torch; ``extra`` are the tensors it reads."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.extra = {
            "soft_cap": {"cap": torch.full((1, 1, 1, 1), CAP)},
            "indices": {},
            "relative": {"table": draw(3, (1, 4, 1, 300))[0], "rows": draw(4, (2, 1, 9, 1))[0]},
            "constant": {"table": draw(3, (1, 4, 9, 300))[0]},
            "root": {},
        }.get(name, {})

    def declare(self, graph, score, records):
        if self.name == "soft_cap":
            ratio = graph.div(a=score, b=records["cap"])
            return graph.mul(a=graph.tanh(input=ratio), b=records["cap"])
        if self.name == "indices":
            column = graph.gen_index(input=score, axis=3)
            row = graph.gen_index(input=score, axis=2)
            head = graph.gen_index(input=score, axis=1)
            batch = graph.gen_index(input=score, axis=0)
            distance = graph.add(a=graph.sub(a=column, b=row), b=graph.add(a=head, b=batch))
            return graph.mul(a=score, b=graph.cos(input=distance))
        if self.name == "relative":
            return graph.add(a=graph.mul(a=score, b=records["table"]), b=records["rows"])
        if self.name == "root":
            return graph.sqrt(input=score)
        if self.name in ACTIVATIONS:
            options = {"negative_slope": 0.01} if self.name == "leaky_relu" else {}
            return getattr(graph, self.name)(input=score, **options)
        return graph.add(a=graph.sub(a=score, b=score), b=records["table"])

    def torch(self, scores):
        if self.name == "soft_cap":
            return CAP * torch.tanh(scores / CAP)
        if self.name == "indices":
            batch, head, row, column = (torch.arange(n).double() for n in scores.shape)
            row, head, batch = row[:, None], head[:, None, None], batch[:, None, None, None]
            return scores * torch.cos(column - row + head + batch)
        if self.name == "relative":
            return scores * self.extra["table"].double() + self.extra["rows"].double()
        if self.name == "root":
            # Of scores below 0, which a mask hides here, autograd wants a number.
            return torch.sqrt(scores.clamp(min=1e-6))
        if self.name in ACTIVATIONS:
            return ACTIVATIONS[self.name](scores)
        return scores - scores + self.extra["table"].double()


@pytest.mark.parametrize("name", ["soft_cap", "indices", "relative", "constant", *ACTIVATIONS])
@pytest.mark.parametrize("causal", [False, True])
def test_forward_and_derived_gradient(ways, name, causal):
    program = Program(name)
    q, k, v, d_o = problem(1)
    rule = ways.Rule(scale=0.5, score_mod=program.torch, right=0 if causal else None)
    operands = {"q": q, "k": k, "v": v}
    options = {"attn_scale": 0.5, "use_causal_mask": causal}
    found = ways.run(
        "sdpa", operands, generate_stats=True, program=program, extra=program.extra, **options
    )
    expected = ways.reference(q, k, v, rule)
    ways.close("O", found["O"], expected["O"], FLOAT32)
    ways.close("Stats", found["Stats"], expected["Stats"], FLOAT32)
    operands.update(o=expected["O"].float(), dO=d_o, stats=expected["Stats"].float())
    found = ways.run("sdpa_backward", operands, program=program, extra=program.extra, **options)
    gradients = ways.gradients(q, k, v, d_o, rule)
    for port, value in found.items():
        ways.close(port, value, gradients[port], FLOAT32)


def test_derived_gradient_in_inference_mode(bench):
    program = Program("relative")
    results = []
    for mode in (False, True):
        with torch.inference_mode(mode):
            q, k, v, d_o = problem(6)
            stats = torch.zeros(2, 4, 9, 1)
            extra = {name: tensor.clone() for name, tensor in program.extra.items()}
            found = bench.run(
                "sdpa_backward",
                {"q": q, "k": k, "v": v, "o": d_o, "dO": d_o, "stats": stats},
                program=program,
                extra=extra,
            )
            results.append({port: value.clone() for port, value in found.items()})
    assert all(torch.equal(results[0][port], results[1][port]) for port in results[0])


def test_given_gradient_program_is_used(ways):
    """A gradient program that is wrong on purpose shows that it is what runs."""
    program = Program("soft_cap")
    q, k, v, d_o = problem(2)
    rule = ways.Rule(scale=0.5, score_mod=program.torch)
    forward = ways.reference(q, k, v, rule)
    operands = {"q": q, "k": k, "v": v, "dO": d_o}
    operands.update(o=forward["O"].float(), stats=forward["Stats"].float())

    def right(graph, gradient, score, records):
        ratio = graph.tanh(input=graph.div(a=score, b=records["cap"]))
        return graph.sub(a=gradient, b=graph.mul(a=gradient, b=graph.mul(a=ratio, b=ratio)))

    def zero(graph, gradient, score, records):
        return graph.sub(a=gradient, b=gradient)

    gradients = ways.gradients(q, k, v, d_o, rule)
    for bprop, factor in ((right, 1.0), (zero, 0.0)):
        found = ways.run(
            "sdpa_backward",
            operands,
            program=program,
            extra=program.extra,
            bprop=bprop,
            attn_scale=0.5,
        )
        ways.close("dQ", found["dQ"], gradients["dQ"] * factor, FLOAT32)
        ways.close("dK", found["dK"], gradients["dK"] * factor, FLOAT32)
        ways.close("dV", found["dV"], gradients["dV"], FLOAT32)


def test_padded_sequences_see_their_own_batch_index(ways):
    program = Program("indices")
    q, k, v, _ = problem(5)
    used_q, used_kv = [9, 5], [211, 300]
    lengths = [torch.tensor(used).view(-1, 1, 1, 1).int() for used in (used_q, used_kv)]
    found = ways.run(
        "sdpa",
        {"q": q, "k": k, "v": v, "seq_len_q": lengths[0], "seq_len_kv": lengths[1]},
        program=program,
        use_padding_mask=True,
    )
    rule = ways.Rule(score_mod=program.torch, len_q=used_q, len_kv=used_kv)
    ways.close("O", found["O"], ways.reference(q, k, v, rule)["O"], FLOAT32)


@pytest.mark.parametrize("what", ["a NaN key", "an infinite key", "scores out of the domain"])
@pytest.mark.parametrize("given", [False, True])
def test_what_a_hidden_score_holds_stays_out_of_gradients(ways, what, given):
    program = Program("root" if what.startswith("scores") else "soft_cap")
    q, k, v, d_o = problem(7)
    if program.name == "root":
        q, k = q.abs() + 0.1, k.abs()
    # Rows from the fifth on see it, the others do not.
    k[:, :, 4] = {"a NaN key": torch.nan, "an infinite key": torch.inf}.get(what, -1.0)
    clean = torch.where(k.isfinite(), k, torch.zeros(()))
    rule = ways.Rule(scale=0.5, score_mod=program.torch, right=0)
    expected = ways.reference(q, clean, v, rule)
    operands = {"q": q, "k": k, "v": v, "dO": d_o}
    operands.update(o=expected["O"].float(), stats=expected["Stats"].float())

    def slope(graph, gradient, score, records):
        if program.name == "root":
            root = graph.sqrt(input=score)
            return graph.div(a=gradient, b=graph.add(a=root, b=root))
        ratio = graph.tanh(input=graph.div(a=score, b=records["cap"]))
        return graph.sub(a=gradient, b=graph.mul(a=gradient, b=graph.mul(a=ratio, b=ratio)))

    found = ways.run(
        "sdpa_backward",
        operands,
        program=program,
        extra=program.extra,
        bprop=slope if given else None,
        attn_scale=0.5,
        use_causal_mask=True,
    )
    gradients = ways.gradients(q, clean, v, d_o, rule)
    ways.close("dQ", found["dQ"][:, :, :4], gradients["dQ"][:, :, :4], FLOAT32)
