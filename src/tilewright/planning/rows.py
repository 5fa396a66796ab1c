"""Capability rows: data that says what an engine can run. Pure, importable with no torch."""

from __future__ import annotations

from tilewright.dtypes import DataType
from tilewright.graph.operation import Operation
from tilewright.planning.devices import DeviceProperties
from tilewright.records import record

FLOATS = frozenset({DataType.FLOAT, DataType.HALF, DataType.BFLOAT16, DataType.DOUBLE})
FP8 = frozenset({DataType.FP8_E4M3, DataType.FP8_E5M2})
BLOCK_SCALED = FP8 | {DataType.FP4_E2M1, DataType.FP8_E8M0}
INTEGERS = frozenset({DataType.INT8, DataType.INT32, DataType.INT64, DataType.UINT8})
INDICES = frozenset({DataType.INT32, DataType.INT64, DataType.UINT8, DataType.BOOLEAN})


@record(frozen=True)
class CapabilityRow:
    """Operation kinds that an engine takes, with which types, on which devices.

    ``data_types`` are the types of tensors that carry values, ``index_types`` those of lengths,
    tables, masks and offsets. ``compute_capabilities`` are exact; None means any.
    """

    operations: tuple[str, ...]
    data_types: frozenset[DataType]
    index_types: frozenset[DataType] = frozenset()
    devices: frozenset[str] = frozenset({"cpu", "cuda"})
    compute_capabilities: frozenset[tuple[int, int]] | None = None
    note: str = ""

    def decline_reason(self, operation: Operation, device: DeviceProperties) -> str | None:
        """Why the row does not admit ``operation`` on ``device``, or None if it does."""
        if device.type not in self.devices:
            return f"device {device}: the row takes {', '.join(sorted(self.devices))}"
        exact = self.compute_capabilities
        if device.type == "cuda" and exact is not None and device.compute_capability not in exact:
            names = ", ".join(f"sm_{major}{minor}" for major, minor in sorted(exact))
            return f"device {device}: the row takes exactly {names}"
        accepted = self.data_types | self.index_types
        for port, tensor in (*operation.inputs.items(), *operation.outputs.items()):
            if tensor.data_type not in accepted:
                names = ", ".join(sorted(data_type.name for data_type in accepted))
                return (
                    f"tensor {tensor.label()} ({port}) has data type {tensor.data_type.name}; "
                    f"the row takes {names}"
                )
        return None


def admit(
    rows: tuple[CapabilityRow, ...], operation: Operation, device: DeviceProperties
) -> str | None:
    """None if some row admits the operation, else why not (the closest row's reason)."""
    reasons = [
        row.decline_reason(operation, device) for row in rows if operation.kind in row.operations
    ]
    if not reasons:
        return f"{operation.title()}: no capability row has operation {operation.kind}"
    if any(reason is None for reason in reasons):
        return None
    return f"{operation.title()}: {reasons[0]}"
