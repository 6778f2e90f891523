"""What a check found: the plan, the batch arithmetic, the memory of every way to partition, the learning rates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from composer_ds.errors import ConfigError
from composer_ds.facts import Settings, TrainerFacts
from composer_ds.memory import RankMemory, rank_memory
from composer_ds.memory_plan import MemoryPlan
from composer_ds.model_sizes import ModelSizes
from composer_ds.ownership import Plan, make_plan

if TYPE_CHECKING:
    from composer_ds.learning_rate import LearningRates

__all__ = ['Findings', 'MemoryRow', 'memory_rows']

_WAYS = [
    (1, None, None), (1, 'cpu', None), (2, None, None), (2, 'cpu', None),
    (3, None, None), (3, None, 'cpu'), (3, 'cpu', None), (3, 'cpu', 'cpu'),
]  # fmt: skip


@dataclass(frozen=True)
class MemoryRow:
    """One way to partition and offload.

    Args:
        zero_stage (int): 1 to 3.
        offload (tuple[str, ...]): What is offloaded: ``'optimizer'``, ``'parameters'``.
        memory (RankMemory | None): None where the settings do not allow this way.
        is_chosen (bool): Whether it is what the file asks for.
    """

    zero_stage: int
    offload: tuple[str, ...]
    memory: RankMemory | None
    is_chosen: bool


@dataclass
class Findings:
    """All that the report shows.

    Args:
        title (str): What was checked.
        world_size (int): Number of ranks.
        plan (Plan | None): None for a run under plain Composer.
        batch (str): The batch arithmetic.
        on_cpu (bool): Whether the run is for a CPU.
        model (str): What is known about the model.
        memory (list[MemoryRow]): Empty where the model is not known.
        rates (LearningRates | None): None where there is no schedule to show.
        remarks (list[str]): Sentences that the user should read.
        origin_of (Callable[[str], str]): Turns the source of a decision into a place in the user's files.
    """

    title: str
    world_size: int
    plan: Plan | None
    batch: str
    on_cpu: bool = False
    model: str = ''
    memory: list[MemoryRow] = field(default_factory=list)
    rates: LearningRates | None = None
    remarks: list[str] = field(default_factory=list)
    origin_of: Callable[[str], str] = str


def memory_rows(settings: Settings, facts: TrainerFacts, sizes: ModelSizes, chosen: Plan | None) -> Iterator[MemoryRow]:
    """Predict the memory of every ZeRO stage with every offload, all else as the user has it.

    Args:
        settings (Settings): What the user gave.
        facts (TrainerFacts): What the Trainer would know.
        sizes (ModelSizes): Of the model.
        chosen (Plan | None): What will be run.

    Yields:
        MemoryRow: In order of the stages.
    """
    zero = {key: value for key, value in settings.zero.items() if key not in ('stage', *_OFFLOADS)}
    ds_config = {**settings.ds_config, 'zero_optimization': zero}
    wanted = None if chosen is None else (chosen.zero_stage, chosen.offload_optimizer, chosen.offload_param)
    for stage, optimizer, param in _WAYS:
        way = replace(settings, zero_stage=stage, offload_optimizer=optimizer, offload_param=param, ds_config=ds_config)
        offload = tuple(name for name, on in (('optimizer', optimizer), ('parameters', param)) if on)
        try:
            plan = make_plan(way, facts)
        except ConfigError:
            yield MemoryRow(stage, offload, None, False)
            continue
        needs = MemoryPlan.of_ds_config(
            plan.ds_config, world_size=facts.world_size, weights=plan.weights, on_cpu=facts.on_cpu
        )
        is_chosen = wanted == (stage, optimizer is not None, param is not None)
        yield MemoryRow(stage, offload, rank_memory(sizes, needs), is_chosen)


_OFFLOADS = ('offload_optimizer', 'offload_param')
