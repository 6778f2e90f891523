"""The only caller of ``deepspeed.initialize``: builds the ``ds_engine`` and takes it down."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from composer import Callback
from composer.core import State
from composer.loggers import Logger
from packaging.version import Version

from composer_ds.deepspeed_output import import_quietly, quiet_output, quieten_logger
from composer_ds.errors import EnvironmentProblem
from composer_ds.scalars import scalars_as_vectors

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

__all__ = ['EngineCloser', 'broadcast_buffers', 'build_engine', 'check_environment', 'close_engine']


# Measured: 0.19.6 and 0.19.7 add up gradients in 16 bits or lose some with ZeRO 2, and with ZeRO 1 and offload; 0.19.6
# does not skip optimizer steps with NaN in fp32. tests/distributed/test_bf16.py and test_clock.py fail with them.
_OLDEST = '0.19.8'


def check_environment() -> None:
    """See to it that DeepSpeed can be imported and can compile. Called when the algorithm is constructed.

    Raises:
        EnvironmentProblem: When the package is missing or too old, or, on a machine without a GPU, a compiler.
    """
    if importlib.util.find_spec('deepspeed') is None:
        raise EnvironmentProblem(
            "DeepSpeed(...) needs the package 'deepspeed', which is not installed. "
            f"Run: pip install 'deepspeed>={_OLDEST},<0.20'"
        )
    version = importlib.metadata.version('deepspeed')
    if Version(version) < Version(_OLDEST):
        raise EnvironmentProblem(
            f'deepspeed {version} trains wrongly in silence: it loses gradients in 16 bits, and goes on with weights '
            f"that are NaN. Run: pip install 'deepspeed>={_OLDEST},<0.20'"
        )
    # On the CPU accelerator deepspeed compiles its shared-memory collectives at first use, and so its CPU optimizers.
    # torch.cuda is asked rather than DeepSpeed, whose import would choose the accelerator.
    if not torch.cuda.is_available():
        compiler = os.environ.get('CXX', 'c++')
        _put_ninja_on_path()
        missing = [program for program in (compiler, 'ninja') if shutil.which(program) is None]
        if missing:
            raise EnvironmentProblem(
                'DeepSpeed compiles C++ extensions at first use on a machine without a GPU, and '
                f'{" and ".join(missing)} cannot be found on the PATH. Install a C++ compiler (Debian: apt-get install '
                'g++; or name yours in the variable CXX) and ninja (pip install ninja).'
            )
    import_quietly()


def _put_ninja_on_path() -> None:
    """Let torch find the ninja of the environment, which is not on the PATH where nobody has activated it."""
    if shutil.which('ninja') is None and importlib.util.find_spec('ninja') is not None:
        import ninja

        os.environ['PATH'] = os.pathsep.join([os.environ.get('PATH', ''), ninja.BIN_DIR])


def build_engine(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, ds_config: dict[str, Any]
) -> DeepSpeedEngine:
    """Build the engine around the user's model. Called at ``BEFORE_LOAD``.

    Collective. Parameters and buffers are taken from rank 0, as torch's DistributedDataParallel does.

    Args:
        model (torch.nn.Module): The user's model, on its device. Its parameters become partitions.
        optimizer (torch.optim.Optimizer): Becomes DeepSpeed's own: its parameter groups are rewritten.
        ds_config (dict[str, Any]): The complete config.

    Returns:
        DeepSpeedEngine: Of stage 1, 2 or 3.
    """
    quieten_logger(ds_config)
    with quiet_output():
        import deepspeed
        from deepspeed.runtime import torch_autocast

        # DeepSpeed (0.19) never takes this flag back, and with it an engine overlooks its communication_data_type.
        torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
        torch_autocast.TORCH_AUTOCAST_DTYPE = None
        with scalars_as_vectors(model.parameters(), ds_config['zero_optimization']['stage']):
            ds_engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=optimizer,  # pyright: ignore[reportArgumentType]
                config=ds_config,
                dist_init_required=False,  # Composer has done it
            )
    return ds_engine


def broadcast_buffers(model: torch.nn.Module) -> None:
    """Give every rank the buffers of rank 0 (running statistics, say), as DistributedDataParallel does.

    Collective.

    Args:
        model (torch.nn.Module): The user's model.
    """
    if dist.get_world_size() == 1:
        return
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for buffer in model.buffers():
        by_dtype.setdefault(buffer.dtype, []).append(buffer.detach())
    for buffers in by_dtype.values():
        together = torch.cat([buffer.reshape(-1) for buffer in buffers])
        dist.broadcast(together, src=0)
        for buffer, whole in zip(buffers, together.split([buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(whole.view_as(buffer))


class EngineCloser(Callback):
    """Composer tells callbacks, not algorithms, that the Trainer is closed.

    Args:
        close_with (Callable[[State], None]): Called then, on every rank.
    """

    def __init__(self, close_with: Callable[[State], None]):
        self.close_with = close_with

    def close(self, state: State, logger: Logger) -> None:
        """Take the engine down. Called by Composer, on every rank.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.
        """
        self.close_with(state)


def close_engine(ds_engine: DeepSpeedEngine) -> None:
    """Remove the engine's hooks from the user's model and free its buffers.

    Args:
        ds_engine (DeepSpeedEngine): Not usable afterwards.
    """
    ds_engine.destroy()
    # Left behind by destroy() (0.19): they would keep the engine and all its buffers alive as long as the model.
    for hook in (ds_engine.module_forward_pre_hook, ds_engine.module_forward_post_hook):
        if hook is not None:
            hook.remove()
