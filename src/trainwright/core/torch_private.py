"""All private names of torch that the library uses, with the versions for which each was checked.

Torch gives no guarantee for these names. "Run": the tests passed with that version on a CPU. "Read": the Python sources
of that version have the name, with the same arguments. Unless a comment says otherwise: 2.13.0 run, 2.11 and 2.8 read.
If a name may be missing, the docstring states the result for that case. `torch._foreach_...` are not listed here:
torch documents them ("Foreach Operations").
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

# Modules. These dicts are filled by `register_buffer` and similar methods; values may be None and can be assigned.

parameter_dict: Callable[[nn.Module], dict[str, Any]] = attrgetter("_parameters")
buffer_dict: Callable[[nn.Module], dict[str, Any]] = attrgetter("_buffers")
child_dict: Callable[[nn.Module], dict[str, Any]] = attrgetter("_modules")
BatchNorm = batchnorm._BatchNorm
"""Base of BatchNorm1d to 3d, SyncBatchNorm and their lazy forms."""
NormWithStatistics = batchnorm._NormBase
"""Base of BatchNorm and InstanceNorm."""


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether the module has forward hooks."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def is_compiled(module: nn.Module) -> bool:
    """Return whether `module.compile()` or `torch.compile(module)` has compiled the module."""
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Make `module(...)` run `call`, as `module.compile()` does; None restores the plain call."""
    module._compiled_call_impl = call


def plain_call(module: nn.Module) -> Callable[..., Any]:
    """Return the uncompiled call of a module, with its hooks."""
    call: Callable[..., Any] = module._call_impl
    return call


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the original module of `torch.compile(module)`; any other module unchanged."""
    return cast(nn.Module, module._orig_mod) if type(module).__name__ == "OptimizedModule" else module


def versions_of(state: Any) -> Any:
    """Return the module versions that `Module.state_dict` attaches to its dict; None for any other dict."""
    return getattr(state, "_metadata", None)


def set_versions(state: Any, versions: Any) -> None:
    """Attach module versions to a state dict, for `Module.load_state_dict`."""
    state._metadata = versions


# Tensors and their storage.

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""The number of in-place changes of a tensor, without writes through `.data`. Inference tensors have none."""
storage_id: Callable[[Any], int] = attrgetter("_cdata")
"""The identity of an untyped storage: the address of its C++ object, which several Python objects may share."""


def storage_uses(storage: Any) -> int | None:
    """Return the number of references to a storage, including views and tensors saved for backward; None if unknown.

    2.13.0 run; other versions not read, since the name is defined in C++.
    """
    count = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else int(count(storage._cdata))


def versions_preserved(tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Restore the version counters of tensors at the end of the block, so that backward accepts the tensors.

    For tensors that are changed inside and restored bit for bit: a current step may have saved them for backward.
    """
    versioned = tuple(tensor for tensor in tensors if not tensor.is_inference())
    preserved: AbstractContextManager[None] = torch.autograd.grad_mode._unsafe_preserve_version_counter(versioned)
    return preserved


def sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return indices and values of a sparse tensor, which need not be coalesced."""
    return tensor._indices(), tensor._values()


def nll_total_weight(loss: Tensor) -> Tensor | None:
    """Return the total weight by which torch's NLL loss has divided, from its graph; None for any other loss.

    2.13.0 run; other versions not read, since the names are defined in generated C++.
    """
    node: Any = loss.grad_fn
    return node._saved_total_weight if type(node).__name__ in {"NllLossBackward0", "NllLoss2DBackward0"} else None


# Kernels, called with the same arguments as by torch's optimizers and GradScaler. 2.13.0 run.

check_and_unscale = torch._amp_foreach_non_finite_check_and_unscale_
update_scale = torch._amp_update_scale_
fused_adam = torch._fused_adam_
fused_adamw = torch._fused_adamw_
fused_sgd = torch._fused_sgd_
fused_adagrad = torch._fused_adagrad_


def devices_with_fused_kernels() -> list[str]:
    """Return the device types for which torch's optimizers support `fused=True`; empty if torch has no such list."""
    listed = getattr(_foreach_utils, "_get_fused_kernels_supported_devices", None)
    return [] if listed is None else list(listed())


def all_reduce(value: Tensor, how: str, group_name: str) -> Tensor:
    """Return the "sum" or "max" over the ranks of a group, by the collectives of DTensor without its overhead."""
    collectives = torch.ops._c10d_functional
    reduced: Tensor = collectives.wait_tensor(collectives.all_reduce(value, how, group_name))
    return reduced


# Optimizers.


def global_step_hooks() -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the global pre-hooks and post-hooks of `Optimizer.step`."""
    return torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks


def is_wrapped_by_scheduler(step: Any) -> bool:
    """Return whether a `step` is the wrapper that a torch scheduler puts on its optimizer permanently."""
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
"""Base class of modes that intercept every operation below autograd."""
profiler_enabled: Callable[[], bool] = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
"""Returns whether torch's profiler is active."""


def function_mode() -> Any:
    """Return the innermost `TorchFunctionMode`, or None."""
    return torch.overrides._get_current_function_mode()


def function_mode_popped() -> AbstractContextManager[Any]:
    """Disable the innermost `TorchFunctionMode` inside the block."""
    popped: AbstractContextManager[Any] = torch.overrides._pop_mode_temporarily()
    return popped


def dynamo_config() -> Any:
    """Return the settings of `torch.compile`. Imports the compiler."""
    import torch._dynamo as dynamo

    return dynamo.config


def compiled_target(forward: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function to compile for a module. Torch skips frames of its own files, unless they are inlined."""
    from torch._dynamo import external_utils, trace_rules

    target: Callable[..., Any] = external_utils.wrap_inline(call) if trace_rules.check(forward) else call
    return target


def freezing_guards() -> dict[str, bool]:
    """Settings of `torch._dynamo.config` by which a parameter that is frozen or unfrozen later is compiled again.

    Torch 2.8 compares no tensor of a module whose dicts are unchanged: the old graph runs, and a parameter that is
    unfrozen does not train. 2.13 compares them; the versions between were not tried.
    """
    return {"skip_tensor_guards_with_matching_dict_tags": False} if torch.__version__ < "2.13" else {}


def dynamo_errors() -> tuple[type[Exception], type[Exception]]:
    """Return two exception classes: for errors of user code during tracing, and for all errors of the compiler."""
    from torch._dynamo import exc

    return exc.TorchRuntimeError, exc.TorchDynamoException


def dynamo_utils() -> Any:
    """Return the module with `counters` and `get_compilation_metrics`."""
    from torch._dynamo import utils

    return utils


# DataLoader: iterators and worker loop. 2.13.0 run; 2.13.0 with the `utils/data` of 2.11 run; 2.8 read.

LoaderWorkers: Any = dataloader._MultiProcessingDataLoaderIter
"""The iterator over worker processes. `data/dataloader/workers.py` overrides `_reset`, `_next_index`, `_process_data`,
`_try_get_data` and `_shutdown_workers`, replaces `_base_seed` and `_worker_queue_idx_cycle` by properties, sets
`_index_sampler`, and reads `_workers`, `_task_info`, `_send_idx`, `_rcvd_idx` and `_timeout`."""
ExceptionWrapper = torch_utils.ExceptionWrapper
"""An exception that a worker sends to the main process."""
collate_tensor_fn = collate.collate_tensor_fn
default_collate_fn_map = collate.default_collate_fn_map
ResumeIteration: Any = worker_loop._ResumeIteration
"""The message of a worker at the start of its next pass."""
EndOfIterable: Any = worker_loop._IterableDatasetStopIteration
"""The message of a worker at the end of its pass over an iterable data set."""
error_if_any_worker_fails: Callable[[], None] = torch._C._error_if_any_worker_fails


def replace_worker_messages(resume: type, end: type) -> None:
    """Make torch's worker loop send these classes instead of `ResumeIteration` and `EndOfIterable`; in a worker."""
    loop: Any = worker_loop
    loop._ResumeIteration, loop._IterableDatasetStopIteration = resume, end


def forget_workers(iterator: Any) -> None:
    """Stop torch's monitoring of the workers of an iterator; a second call is a no-op."""
    if is_started(iterator):
        torch._C._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False


def is_started(iterator: Any) -> bool:
    """Return whether the workers of an iterator were started; False after an error in its constructor."""
    return bool(getattr(iterator, "_worker_pids_set", False))


def index_queues(iterator: Any) -> list[Any]:
    """Return the index queues of the workers; empty after an error in the constructor of the iterator."""
    return list(getattr(iterator, "_index_queues", ()))


def is_shut_down(iterator: Any, *, default: bool) -> bool:
    """Return whether the workers of an iterator were shut down; `default` after an error in its constructor."""
    return bool(getattr(iterator, "_shutdown", default))


def iterator_of(loader: Any) -> Iterator[Any]:
    """Return a new iterator over a loader, not the shared one of persistent workers."""
    made: Iterator[Any] = loader._get_iterator()
    return made


LOADER_HOOKS = ("_get_iterator", "_index_sampler")
"""Members of `DataLoader` that `__iter__` uses to make its iterator; a subclass may override them."""


def persistent_iterator(loader: Any) -> Any:
    """Return the iterator of a loader with persistent workers; None before the first pass."""
    return vars(loader).get("_iterator")


def set_persistent_iterator(loader: Any, iterator: Any) -> None:
    """Set the iterator whose persistent workers a loader uses next; None: it starts new workers."""
    vars(loader)["_iterator"] = iterator


def is_under_way(iterator: Any) -> bool:
    """Return whether workers still read batches for an iterator; False for None."""
    return bool(getattr(iterator, "_tasks_outstanding", 0))


def host_fetcher(iterator: Any) -> Any:
    """Return the fetcher of a map-style data set in this process, without pinning; None for any other iterator."""
    if type(iterator) is not dataloader._SingleProcessDataLoaderIter or iterator._pin_memory:
        return None
    fetcher: Any = iterator._dataset_fetcher
    return fetcher if type(fetcher) is fetch._MapDatasetFetcher else None


index_sampler_of: Callable[[Any], Any] = attrgetter("_index_sampler")
sampler_iterator_of: Callable[[Any], Iterator[Any]] = attrgetter("_sampler_iter")


# Process groups and DDP.


def default_store(distributed: Any) -> Any:
    """Return the key-value store of the default process group; `distributed`: the module `torch.distributed`."""
    return distributed.distributed_c10d._get_default_store()


def check_reducer_finalized(ddp: Any) -> None:
    """Raise RuntimeError if a bucket of a DDP module still waits for the gradient of an unused parameter."""
    ddp._check_reducer_finalized()


# FSDP2. 2.13.0 run with gloo. 2.12 added several groups per module, 2.13 `reset_iter_state`.


def fsdp_groups(module: Any) -> list[Any]:
    """Return the parameter groups of one sharded module, each gathered as one; empty without parameters."""
    state = module._get_fsdp_state()
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def fsdp_initialize(root: Any) -> None:
    """Make a module the FSDP root of its blocks now: otherwise the first module to be called becomes the root."""
    root._get_fsdp_state()._lazy_init()


def fsdp_update_dtypes(group: Any) -> None:
    """Update the dtypes of a group after parameters were frozen or unfrozen."""
    group._init_mp_dtypes()


def fsdp_drop_unsharded_gradients(groups: Iterable[Any]) -> None:
    """Drop gradients that are not reduced yet."""
    for group in groups:
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def fsdp_reset(root: Any, modules: Iterable[Any], groups: Iterable[Any]) -> None:
    """Reset the state of an interrupted window, as `reset_iter_state` of torch 2.13 does."""
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
