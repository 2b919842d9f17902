"""Every private name of torch that the library uses, with the versions of torch for which each was checked.

Torch promises nothing about these names. "Run": the tests passed with that version on a CPU. "Read": the Python sources
of that version have the name, with the same arguments. Unless a comment says otherwise: 2.13.0 run, 2.11 and 2.8 read.
Where a name may be missing, the function here says what it returns then. `torch._foreach_...` are no such names:
torch's documentation lists them ("Foreach Operations").
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import Any, cast

import torch
import torch.optim.optimizer as torch_optimizer
from torch import Tensor, nn
from torch import _utils as torch_utils
from torch.nn.modules import batchnorm
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, SequentialLR
from torch.utils import _foreach_utils, _python_dispatch
from torch.utils.data import dataloader
from torch.utils.data._utils import collate, fetch
from torch.utils.data._utils import worker as worker_loop

# Modules. The dicts are what `register_buffer` and its like fill; they hold None too, and can be assigned to.

parameter_dict: Callable[[nn.Module], dict[str, Any]] = attrgetter("_parameters")
buffer_dict: Callable[[nn.Module], dict[str, Any]] = attrgetter("_buffers")
child_dict: Callable[[nn.Module], dict[str, Any]] = attrgetter("_modules")
BatchNorm = batchnorm._BatchNorm
"""BatchNorm of all dimensions, SyncBatchNorm and the lazy ones."""
NormWithStatistics = batchnorm._NormBase
"""BatchNorm and InstanceNorm."""


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether a forward of the module calls hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` or `torch.compile(module)` has compiled its call."""
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Have `module(...)` run `call`, as `module.compile()` does; None for the plain call."""
    module._compiled_call_impl = call


def plain_call(module: nn.Module) -> Callable[..., Any]:
    """The call of a module with its hooks, never compiled."""
    call: Callable[..., Any] = module._call_impl
    return call


def uncompiled(module: nn.Module) -> nn.Module:
    """The module inside the result of `torch.compile(module)`; any other module itself."""
    return cast(nn.Module, module._orig_mod) if type(module).__name__ == "OptimizedModule" else module


def versions_of(state: Any) -> Any:
    """The versions of modules that `Module.state_dict` notes beside the tensors; None for another dict."""
    return getattr(state, "_metadata", None)


def set_versions(state: Any, versions: Any) -> None:
    """Note the versions of modules beside the tensors of a state dict, as `Module.load_state_dict` reads them."""
    state._metadata = versions


# Tensors and their storage.

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor was changed in place; writes through `.data` are not counted. An inference tensor has none."""
storage_id: Callable[[Any], int] = attrgetter("_cdata")
"""The identity of an untyped storage: that of its object in C++, for which there may be several objects in Python."""


def storage_uses(storage: Any) -> int | None:
    """The references to a storage, by views and by tensors saved for backward too; None where torch has no count.

    2.13.0 run; other versions not read: the name is one of C++.
    """
    count = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else int(count(storage._cdata))


def versions_preserved(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Restore the current version counters of tensors at the end of the block, so that backward accepts the tensors.

    For tensors that are changed inside and restored bit for bit: a step under way may have saved them for its backward.
    """
    versioned = tuple(tensor for tensor in tensors if not tensor.is_inference())
    preserved: AbstractContextManager[None] = torch.autograd.grad_mode._unsafe_preserve_version_counter(versioned)
    return preserved


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values of a sparse tensor that may not be coalesced."""
    return tensor._indices(), tensor._values()


def nll_total_weight(loss: Tensor) -> Tensor | None:
    """The total weight by which torch's NLL divided, from the graph of the loss; None for any other loss.

    2.13.0 run; other versions not read: the names come from a file that generates C++.
    """
    node: Any = loss.grad_fn
    return node._saved_total_weight if type(node).__name__ in {"NllLossBackward0", "NllLoss2DBackward0"} else None


# Kernels, with the arguments by which torch's own optimizers and GradScaler call them. 2.13.0 run.

check_and_unscale = torch._amp_foreach_non_finite_check_and_unscale_
update_scale = torch._amp_update_scale_
fused_adam = torch._fused_adam_
fused_adamw = torch._fused_adamw_
fused_sgd = torch._fused_sgd_
fused_adagrad = torch._fused_adagrad_


def devices_with_fused_kernels() -> list[str]:
    """The types of devices for which torch's optimizers take `fused=True`; none where torch does not say."""
    listed = getattr(_foreach_utils, "_get_fused_kernels_supported_devices", None)
    return [] if listed is None else list(listed())


def all_reduce(value: Tensor, how: str, group_name: str) -> Tensor:
    """The "sum" or "max" over the processes of a group, by the collectives that DTensor uses, without its overhead."""
    collectives = torch.ops._c10d_functional
    reduced: Tensor = collectives.wait_tensor(collectives.all_reduce(value, how, group_name))
    return reduced


# Optimizers.


def global_step_hooks() -> tuple[dict[int, Any], dict[int, Any]]:
    """The hooks before and after `step` of all optimizers."""
    return torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks


def is_wrapped_by_scheduler(step: Any) -> bool:
    """Whether a `step` is the wrapper that a scheduler of torch leaves on its optimizer, for good."""
    return hasattr(step, "_wrapped_by_lr_sched")


SEQUENCE_WARNS = not hasattr(LRScheduler, "_update_lr")
"""Whether `SequentialLR.step` causes a warning at a milestone: it passes the deprecated epoch. 2.8 run."""


def step_scheduler(scheduler: Any, *number: float) -> None:
    """Step a scheduler of torch's; one of the user's class warns as in a plain loop, one of torch's own does not."""
    quiet = SEQUENCE_WARNS and type(scheduler) in {SequentialLR, ChainedScheduler}
    with _no_epoch_warning() if quiet else nullcontext():
        scheduler.step(*number)


@contextmanager
def _no_epoch_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        message = "The epoch parameter in `scheduler.step"
        warnings.filterwarnings("ignore", message, UserWarning, r"torch\.optim\.lr_scheduler")
        yield


# The profiler, modes and the compiler.

TorchDispatchMode = _python_dispatch.TorchDispatchMode
"""A mode that intercepts every operation below autograd."""
profiler_enabled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
"""Whether a profiler of torch runs."""


def function_mode() -> Any:
    """The innermost `TorchFunctionMode`, or None."""
    return torch.overrides._get_current_function_mode()


def function_mode_popped() -> AbstractContextManager[Any]:
    """Leave the innermost `TorchFunctionMode` inside."""
    popped: AbstractContextManager[Any] = torch.overrides._pop_mode_temporarily()
    return popped


def dynamo_config() -> Any:
    """The settings of `torch.compile`; loads the compiler."""
    import torch._dynamo as dynamo

    return dynamo.config


def compiled_target(forward: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """The function to compile for a module: torch compiles no frame of its own files, and must inline those."""
    from torch._dynamo import external_utils, trace_rules

    target: Callable[..., Any] = external_utils.wrap_inline(call) if trace_rules.check(forward) else call
    return target


def dynamo_errors() -> tuple[type[Exception], type[Exception]]:
    """The classes of an error of user code in tracing, and of any other error of the compiler."""
    from torch._dynamo import exc

    return exc.TorchRuntimeError, exc.TorchDynamoException


def dynamo_utils() -> Any:
    """The module with `counters` and `get_compilation_metrics`."""
    from torch._dynamo import utils

    return utils


# DataLoader: its iterators and its worker loop. 2.13.0 run; 2.11 run in place of 2.13's `utils/data`; 2.8 read.

LoaderWorkers: Any = dataloader._MultiProcessingDataLoaderIter
"""The iterator over worker processes. data/dataloader/workers.py overrides `_reset`, `_next_index`, `_process_data`,
`_try_get_data` and `_shutdown_workers`, replaces `_base_seed` and `_worker_queue_idx_cycle` by properties, sets
`_index_sampler`, and reads `_workers`, `_task_info`, `_send_idx`, `_rcvd_idx` and `_timeout`."""
ExceptionWrapper = torch_utils.ExceptionWrapper
"""An exception of a worker on its way to the main process."""
collate_tensor_fn = collate.collate_tensor_fn
default_collate_fn_map = collate.default_collate_fn_map
ResumeIteration: Any = worker_loop._ResumeIteration
"""A worker's answer that it begins its next pass."""
EndOfIterable: Any = worker_loop._IterableDatasetStopIteration
"""A worker's message that its pass over an iterable data set has ended."""
error_if_any_worker_fails: Callable[[], None] = torch._C._error_if_any_worker_fails


def replace_worker_messages(resume: type, end: type) -> None:
    """In a worker process: have torch's loop make these classes in place of `ResumeIteration` and `EndOfIterable`."""
    loop: Any = worker_loop
    loop._ResumeIteration, loop._IterableDatasetStopIteration = resume, end


def forget_workers(iterator: Any) -> None:
    """Stop torch from watching the workers of an iterator; a second call is a no-op."""
    if is_started(iterator):
        torch._C._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False


def is_started(iterator: Any) -> bool:
    """Whether the workers of an iterator were started: an error in its constructor may have prevented it."""
    return bool(getattr(iterator, "_worker_pids_set", False))


def index_queues(iterator: Any) -> list[Any]:
    """The queues by which workers are asked for batches; none where the constructor of the iterator has failed."""
    return list(getattr(iterator, "_index_queues", ()))


def is_shut_down(iterator: Any, *, default: bool) -> bool:
    """Whether the workers of an iterator were shut down; `default` where its constructor has failed."""
    return bool(getattr(iterator, "_shutdown", default))


def iterator_of(loader: Any) -> Iterator[Any]:
    """A new iterator over a loader, in place of the one that persistent workers share."""
    made: Iterator[Any] = loader._get_iterator()
    return made


LOADER_HOOKS = ("_get_iterator", "_index_sampler")
"""Members of `DataLoader` by which `__iter__` makes its iterator; a subclass that overrides one has its own way."""


def persistent_iterator(loader: Any) -> Any:
    """The iterator that the persistent workers of a loader share; None before the first pass."""
    return vars(loader).get("_iterator")


def set_persistent_iterator(loader: Any, iterator: Any) -> None:
    """Have a loader continue with the workers of another iterator; None: it starts new ones."""
    vars(loader)["_iterator"] = iterator


def is_under_way(iterator: Any) -> bool:
    """Whether worker processes still read batches for an iterator; False for None."""
    return bool(getattr(iterator, "_tasks_outstanding", 0))


def host_fetcher(iterator: Any) -> Any:
    """The fetcher of a map-style data set in this process, without pinning; None for any other iterator."""
    if type(iterator) is not dataloader._SingleProcessDataLoaderIter or iterator._pin_memory:
        return None
    fetcher: Any = iterator._dataset_fetcher
    return fetcher if type(fetcher) is fetch._MapDatasetFetcher else None


index_sampler_of: Callable[[Any], Any] = attrgetter("_index_sampler")
sampler_iterator_of: Callable[[Any], Iterator[Any]] = attrgetter("_sampler_iter")


# Several processes.


def default_store(distributed: Any) -> Any:
    """The key-value store of the default process group, given the module `torch.distributed`."""
    return distributed.distributed_c10d._get_default_store()


def check_reducer_finalized(ddp: Any) -> None:
    """Raise RuntimeError where gradients of a DDP module still wait for those of an unused parameter."""
    ddp._check_reducer_finalized()


# FSDP2. 2.13.0 run with gloo; 2.12 brought several groups for each module, 2.13 `reset_iter_state`.


def fsdp_groups(module: Any) -> list[Any]:
    """The parameters of one sharded module that are gathered together: none where it has no parameter."""
    state = module._get_fsdp_state()
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def fsdp_initialize(root: Any) -> None:
    """Make a module the root of its sharded blocks now: a block that is called first would become the root."""
    root._get_fsdp_state()._lazy_init()


def fsdp_update_dtypes(group: Any) -> None:
    """Update the dtypes of a group after a change of the parameters that require a gradient."""
    group._init_mp_dtypes()


def fsdp_drop_unsharded_gradients(groups: Iterable[Any]) -> None:
    """Drop gradients that were not reduced yet."""
    for group in groups:
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def fsdp_reset(root: Any, modules: Iterable[Any], groups: Iterable[Any]) -> None:
    """Reset the state that an interrupted window has left, as `reset_iter_state` of torch 2.13 does."""
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    for group in groups:
        group.wait_for_unshard()
        group._training_state = type(group._training_state).IDLE
        group._post_forward_indices.clear()
        group.comm_ctx.post_forward_order.clear()
    for module in modules:
        state = module._get_fsdp_state()
        state._training_state = type(state._training_state).IDLE
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
