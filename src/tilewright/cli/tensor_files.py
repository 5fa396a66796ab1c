"""Tensors in safetensors and npz files, read whole and written at once or not at all.

npz has no bfloat16 and no 8-bit floats: those are kept as their codes in uint16 and uint8.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from tilewright.cli.exits import fail
from tilewright.cli.files import atomic_writer, check_readable, check_tensor_suffix

# The date in every entry of an npz, so that equal tensors give equal files.
_ZIP_DATE = (1980, 1, 1, 0, 0, 0)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a file, by name.

    Raises:
        CommandError: if the file is missing, cut short, or of another kind.
    """
    check_tensor_suffix(path)
    check_readable(path)
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    return _read_npz(path)


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Write tensors (any strides and device) by name; the file appears whole or not at all.

    Raises:
        CommandError: if it cannot be written.
    """
    check_tensor_suffix(path)
    dense = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_writer(path) as file:
        if path.suffix == ".safetensors":
            import safetensors.torch

            # Outputs that are views of one storage are written as tensors of their own.
            separate = {name: tensor.clone() for name, tensor in dense.items()}
            file.write(safetensors.torch.save(separate, dict(metadata)))
        else:
            _write_npz(file, dense)


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    import safetensors
    import safetensors.torch

    try:
        return safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError, ValueError, KeyError, AttributeError) as error:
        fail(f"{path}: not a safetensors file, or cut short: {_first_line(error)}")


def _read_npz(path: Path) -> dict[str, torch.Tensor]:
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            fail(f"{path}: holds one array without a name; expected an npz archive")
        with archive:
            return {name: _from_numpy(archive[name]) for name in archive.files}
    except (zipfile.BadZipFile, zlib.error, OSError, ValueError, EOFError, TypeError) as error:
        fail(f"{path}: not an npz archive, or cut short: {_first_line(error)}")


def _from_numpy(array: Any) -> torch.Tensor:
    if not isinstance(array, np.ndarray):
        raise ValueError("an entry is no array")
    # torch takes the machine's byte order and positive strides only.
    native = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(native.reshape(array.shape).copy())


def _write_npz(file: IO[bytes], tensors: Mapping[str, torch.Tensor]) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        for name, tensor in tensors.items():
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=_ZIP_DATE)
            with archive.open(entry, "w", force_zip64=True) as stream:
                np.save(stream, _to_numpy(tensor), allow_pickle=False)


def _to_numpy(tensor: torch.Tensor) -> Any:
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    if tensor.dtype.is_floating_point and tensor.element_size() == 1:
        return tensor.view(torch.uint8).numpy()
    return tensor.numpy()


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
