"""The public graph: declare, plan, build, execute."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tilewright.errors import BindingError, GraphError, NotSupportedError
from tilewright.graph import json_form
from tilewright.graph.enums import build_plan_policy, heur_mode
from tilewright.graph.tensor import Tensor
from tilewright.planning.copying import CopyableGraph
from tilewright.planning.devices import DeviceProperties, device_properties
from tilewright.planning.plans import propose_plans

if TYPE_CHECKING:
    from tilewright.engines.base import Launchable


class Graph(CopyableGraph):
    """A graph of tensor operations and its life: validate, plan, build, execute.

    Each step implies those before it. Planning is one-shot: a graph is validated and planned
    once, and does not change afterwards.

    Args:
        name: what messages call the graph.
        io_data_type: the type of inputs and outputs that set none.
        intermediate_data_type: the type of tensors inside the graph that set none.
        compute_data_type: the type of arithmetic of operations that set none.
        handle: a device and a stream, of ``create_handle``; default: the current GPU, else the CPU.
        device_property: plan for this device, which need not be here.
        is_override_shape_enabled: let ``execute`` take other dims and strides.
        inputs, outputs: ``set_io_tuples`` at the end of ``with``.
        heuristics: heuristic modes of the build there.
        workspace_alloc: if false, a call of the graph makes no workspace and must be given one.

    The other arguments are the vocabulary's; they are kept, and change nothing.

    Raises:
        GraphError: if a data type is none of the vocabulary.
    """

    def __init__(
        self,
        name: str = "test_graph",
        io_data_type: object = None,
        intermediate_data_type: object = None,
        compute_data_type: object = None,
        handle: Any = None,
        sm_count: int | None = None,
        sm_version: int | None = None,
        kernel_cache: Any = None,
        device_property: DeviceProperties | None = None,
        is_dynamic_shape_enabled: bool = False,
        is_override_shape_enabled: bool = False,
        *,
        is_cuda_graph_replay_expected: bool = False,
        inputs: Iterable[str] | None = None,
        outputs: Iterable[str] | None = None,
        heuristics: Sequence[heur_mode] | None = None,
        workspace_alloc: bool = True,
    ) -> None:
        super().__init__(name, io_data_type, intermediate_data_type, compute_data_type)
        self.handle = handle
        self.sm_count = sm_count
        self.sm_version = sm_version
        self.kernel_cache = kernel_cache
        self.device_property = device_property
        self.is_dynamic_shape_enabled = bool(is_dynamic_shape_enabled)
        self.is_override_shape_enabled = bool(is_override_shape_enabled)
        self.is_cuda_graph_replay_expected = bool(is_cuda_graph_replay_expected)
        self._declared_form: dict[str, Any] | None = None
        self._io_tuples = (None, None)
        self._at_exit = (inputs, outputs, heuristics)
        self._makes_workspace = bool(workspace_alloc)
        self._plan_nothing()

    # -- life cycle ---------------------------------------------------------------------------

    def validate(self) -> None:
        """Infer what was left open and check the whole graph; it is closed afterwards.

        Raises:
            GraphError: naming the tensor or operation, what was given, and the rule.
        """
        if self.is_validated:
            return
        if self.is_override_shape_enabled:
            # What the user declared, before inference fills the rest: an override infers anew.
            self._number_tensors()
            self._declared_form = json_form.to_dict(self)
        super().validate()

    def build_operation_graph(self) -> None:
        """Validate; there is no separate backend graph here."""
        self.validate()

    def create_execution_plans(self, heur_modes: Sequence[heur_mode] = (heur_mode.A,)) -> None:
        """Rank the plans of the engines that take the graph; later ones when they are asked for.

        Raises:
            GraphError: if the graph is wrong, or has plans already.
        """
        if self._plans is not None:
            raise GraphError(f"graph {self.name!r} has plans already; planning is one-shot")
        try:
            for mode in heur_modes:
                heur_mode(mode)
        except (TypeError, ValueError) as error:
            accepted = ", ".join(mode.name for mode in heur_mode)
            raise GraphError(
                f"heur_modes: got {heur_modes!r}; expected a sequence of heur_mode's {accepted}"
            ) from error
        self.build_operation_graph()
        self._plans = propose_plans(self, self._device_properties(), self._torch_device())

    def check_support(self) -> None:
        """Require that some plan is left.

        Raises:
            NotSupportedError: with every engine's reason.
        """
        if self._first_open() is None:
            raise NotSupportedError(f"no plan\n{self.explain()}")

    def build_plans(self, policy: build_plan_policy = build_plan_policy.HEURISTICS_CHOICE) -> None:
        """Build the selected plan, else the best one left that can be built; or all of them too.

        A plan that its engine cannot build after all is barred, with the reason, and the next best
        is built; one that was selected is not replaced.

        Raises:
            GraphError: if ``policy`` is none.
            NotSupportedError: if none is left, or the selected one cannot be built.
        """
        try:
            policy = build_plan_policy(policy)
        except ValueError as error:
            accepted = ", ".join(each.name for each in build_plan_policy)
            raise GraphError(
                f"policy: got {policy!r}; expected a build_plan_policy, {accepted}"
            ) from error
        self.check_support()
        if policy is build_plan_policy.ALL:
            self._build_open()
        chosen = self._build_first() if self._selected is None else self._selected
        if chosen is None:
            self.check_support()
            return
        self.build_plan_at_index(chosen)
        self._selected, self._active = chosen, self._built[chosen]

    def build(self, heur_modes: Sequence[heur_mode] = (heur_mode.A,)) -> None:
        """All steps: validate, plan, check support, build the best plan.

        Raises:
            GraphError: if the graph is wrong.
            NotSupportedError: if no engine takes it, with every engine's reason.
        """
        if self._plans is None:
            self.create_execution_plans(heur_modes)
        self.build_plans()

    @property
    def is_built(self) -> bool:
        """True once a plan is built and selected."""
        return self._active is not None

    def get_workspace_size(self) -> int:
        """Bytes of workspace that the selected plan needs.

        Raises:
            NotSupportedError: if no engine takes the graph.
        """
        return self._active_plan().workspace_bytes

    def execute(
        self,
        variant_pack: Mapping[Any, Any],
        workspace: Any = None,
        handle: Any = None,
        override_uids: Sequence[int] | None = None,
        override_shapes: Sequence[Sequence[int]] | None = None,
        override_strides: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Check the call, then run the selected plan: bind, and launch.

        Args:
            variant_pack: tensors, uids or names to torch tensors, int pointers or DLPack objects;
                a buffer is read with the declared dim and stride.
            workspace: a buffer of at least ``get_workspace_size()`` bytes.
            handle: the device's stream to run on; default the graph's, else the current one.
            override_uids: tensors that have another dim (and stride) in this call, which
                ``override_shapes`` and ``override_strides`` give in the same order.

        Raises:
            BindingError: if an operand does not fit; nothing was written then.
            NotSupportedError: if no engine takes the graph.
            LaunchError: if the device refuses.
        """
        if override_uids:
            graph = self._override(override_uids, override_shapes, override_strides)
            graph.execute(variant_pack, workspace, handle)
            return
        built = self._active
        if built is None:
            built = self._active_plan()
        chosen = self.handle if handle is None else handle
        built.execute(variant_pack, workspace, None if chosen is None else _stream(chosen))

    def bind(self, variant_pack: Mapping[Any, Any], workspace: Any = None) -> Launchable:
        """Check a call and return its frame; ``frame.launch(stream)`` is the hot path.

        Without a stream it goes to that of the graph's handle, else to the device's current one.

        Arguments as for ``execute``. The buffers are read at each launch, as they are then.

        Raises:
            BindingError: if an operand does not fit.
            NotSupportedError: if no engine takes the graph.
        """
        return self._active_plan().bind(variant_pack, workspace, self.handle)

    # -- the rest of the vocabulary -----------------------------------------------------------

    def key(self) -> str:
        """A digest of the validated declaration (not of names of tensors or of the device)."""
        self.validate()
        form = json_form.to_dict(self)
        for tensor in form["tensors"]:
            tensor["name"] = ""
        text = json.dumps(form, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def query_tensor_attributes_of_uid(self, uid: int) -> Tensor:
        """The tensor with this uid.

        Raises:
            GraphError: if the graph has none.
        """
        for tensor in self.tensors:
            if tensor.uid == uid:
                return tensor
        raise GraphError(f"graph {self.name!r} has no tensor with uid {uid}")

    def serialize(self) -> bytes:
        """The validated graph and its selected plan, as JSON."""
        self.validate()
        document: dict[str, Any] = {"graph": json_form.to_dict(self), "plan": None}
        if self._selected is not None:
            plan = self._plan(self._selected)
            knobs = {knob.name: value for knob, value in plan.knobs}
            document["plan"] = {"engine": plan.engine_id, "knobs": knobs}
        return json.dumps(document).encode()

    def deserialize(self, *arguments: Any) -> None:
        """Read what ``serialize`` wrote: ``deserialize(data)`` or ``deserialize(handle, data)``.

        The graph must be empty. A stored plan is selected again.

        Raises:
            GraphError: if the data is not the form of a graph.
            NotSupportedError: if the stored plan is not offered here.
        """
        if len(arguments) == 2:
            self.handle = arguments[0]
        elif len(arguments) != 1:
            raise GraphError("deserialize takes (data) or (handle, data)")
        if self.tensors or self.operations:
            raise GraphError("deserialize needs an empty graph")
        document = json_form.parse(arguments[-1])
        json_form.fill_from_dict(self, document.get("graph"))
        self.validate()
        plan = document.get("plan")
        if plan is not None:
            engine, knobs = json_form.read_plan(plan)
            self.create_execution_plan(engine, knobs)

    def populate_cuda_graph(
        self, handle: Any, variant_pack: Mapping[Any, Any], workspace: Any, cuda_graph: Any
    ) -> None:
        """Add the selected plan's kernels, bound to these buffers, to an empty CUDA graph.

        ``cuda_graph`` is a cudaGraph_t as an int, or an object with ``raw_cuda_graph()``. Nothing
        runs, and no stream is needed; ``handle`` is the vocabulary's and may be None. The buffers
        and the workspace are the caller's to keep as long as the graph may be launched.

        Raises:
            NotSupportedError: if the plan is not made of prepared kernels.
            BindingError: if an operand does not fit, or the CUDA graph has nodes already.
        """
        self._active_plan().populate_cuda_graph(variant_pack, workspace, cuda_graph)

    def update_cuda_graph(
        self,
        handle: Any,
        variant_pack: Mapping[Any, Any],
        workspace: Any,
        cuda_graph: Any,
        cuda_graph_exec: int | None = None,
    ) -> None:
        """Bind a CUDA graph that ``populate_cuda_graph`` filled to other buffers.

        ``cuda_graph_exec``, a cudaGraphExec_t as an int, is an instance of that very graph, which
        is updated too; where the graph became a child node, the caller updates the instance from
        it.

        Raises:
            NotSupportedError: if the plan is not made of prepared kernels.
            BindingError: if an operand does not fit, or the graph is none that the plan filled.
        """
        self._active_plan().update_cuda_graph(variant_pack, workspace, cuda_graph, cuda_graph_exec)

    # -- inside -------------------------------------------------------------------------------

    def _torch_device(self) -> Any:
        if self.handle is not None:
            device = getattr(self.handle, "device", None)
            if device is None:
                raise BindingError(_no_handle(self.handle))
            return device
        from tilewright.launch.handles import default_device

        return default_device()

    def _device_properties(self) -> DeviceProperties:
        given = self.device_property
        if given is None:
            return device_properties(self._torch_device())
        if not isinstance(given, DeviceProperties):
            raise BindingError(
                f"device_property: got {type(given).__name__}; expected what "
                "tilewright.create_device_properties gives"
            )
        return given

    def _stream(self, handle: Any) -> Any:
        chosen = self.handle if handle is None else handle
        return None if chosen is None else _stream(chosen)

    def _override(
        self,
        uids: Sequence[int],
        shapes: Sequence[Sequence[int]] | None,
        strides: Sequence[Sequence[int]] | None,
    ) -> Graph:
        """This graph with other shapes, planned by the same engine; one an override set."""
        if self._declared_form is None:
            self._active_plan()
        if self._declared_form is None:
            raise BindingError(
                f"graph {self.name!r}: an override needs is_override_shape_enabled=True at "
                "declaration"
            )
        from tilewright.planning.overrides import overridden_form, override_key

        key = override_key(uids, shapes, strides)
        if key not in self._overridden:
            graph = Graph(handle=self.handle, device_property=self.device_property)
            form = overridden_form(self._declared_form, *key)
            try:
                json_form.fill_from_dict(graph, form)
                # The engine's best plan for these shapes: the knobs were chosen for others.
                chosen = self._active_plan().plan.engine_name
                graph.deselect_engines({p.engine_name for p in graph.plans} - {chosen})
                graph.build_plans()
            except (GraphError, NotSupportedError) as error:
                raise BindingError(f"override: {error}") from error
            self._overridden[key] = graph
        return self._overridden[key]


def _stream(handle: Any) -> Any:
    try:
        return handle.stream
    except AttributeError:
        raise BindingError(_no_handle(handle)) from None


def _no_handle(handle: Any) -> str:
    return f"handle: got {type(handle).__name__}; expected what tilewright.create_handle gives"


pygraph = Graph
