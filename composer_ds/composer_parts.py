"""What becomes of each algorithm and callback of Composer 0.32.1 beside DeepSpeed, as data.

``docs/composer_algorithms.md`` shows the same table to users. ``tests/unit/test_composer_parts.py`` walks over
everything that the installed Composer ships and fails on a class that is not decided here, and
``tests/distributed/test_algorithms.py`` trains with those that touch weights, gradients or the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from composer.core import Event

__all__ = [
    'ALGORITHMS', 'CALLBACKS', 'TRAINER_FEATURES', 'Decision', 'decision_on', 'problems_of_late_surgery',
    'problems_of_parts',
]  # fmt: skip

Verdict = Literal['works', 'translated', 'refused']


@dataclass(frozen=True)
class Decision:
    """What becomes of a class.

    Args:
        verdict (Verdict): ``'works'`` as in plain Composer, ``'translated'`` into something of ours that does the same,
            or ``'refused'`` with a :class:`~composer_ds.errors.ConfigError` from ``Trainer(...)``.
        reason (str): What happens, or why not.
        instead (str): For what is refused, at all or under a condition: what to write instead.
        problem (Callable[[Any, int], str | None] | None): For what works under a condition: given the object and the
            ZeRO stage, what is wrong with it, or None.
        limit (str): The condition in words, for the documentation.
    """

    verdict: Verdict
    reason: str
    instead: str = ''
    problem: Callable[[Any, int], str | None] | None = None
    limit: str = ''


def _late_surgery(algorithm: Any, zero_stage: int) -> str | None:
    if algorithm.apply_at == Event.INIT:
        return None
    return f'replaces layers at {algorithm.apply_at.name} (apply_at), when DeepSpeed has taken the weights already'


def _blocks_at_random(algorithm: Any, zero_stage: int) -> str | None:
    if algorithm.stochastic_method == 'block' and zero_stage in (2, 3):
        return (
            f"drops other blocks on each rank (stochastic_method='block'), and ZeRO {zero_stage} needs the same "
            'parameters on every rank'
        )
    return None


_IN_THE_BATCH = {
    Event.BEFORE_TRAIN_BATCH, Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.BEFORE_LOSS, Event.AFTER_LOSS,
    Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD, Event.EVAL_BEFORE_FORWARD, Event.EVAL_AFTER_FORWARD,
    Event.PREDICT_BEFORE_FORWARD, Event.PREDICT_AFTER_FORWARD,
}  # fmt: skip


def _loads_too_early_or_in_the_batch(callback: Any, zero_stage: int) -> str | None:
    if callback.event in _IN_THE_BATCH:
        return f'loads at {callback.event.name}, between the forward pass of a batch and its optimizer step'
    if callback.event == Event.INIT and not callback.load_weights_only:
        return (
            'loads at INIT, before DeepSpeed makes its own optimizer state, so that the optimizer state of the '
            'checkpoint would be lost'
        )
    return None


_DATA = 'Changes the data only.'
_LOSS = 'Changes the inputs, the targets or the loss of a microbatch, before the backward pass.'
_SURGERY = 'Replaces layers at INIT, before DeepSpeed takes the model.'
_READS = 'Reads what the Trainer knows; touches neither weights nor gradients.'

ALGORITHMS: dict[str, Decision] = {
    'Alibi': Decision('works', _SURGERY + ' (Its own surgery fails on the models of transformers 5.)'),
    'AugMix': Decision('works', _DATA),
    'BlurPool': Decision('works', _SURGERY),
    'ChannelsLast': Decision(
        'refused',
        'gives the weights a memory format that DeepSpeed cannot broadcast, and that would be lost when ZeRO flattens '
        'the weights',
        'convert the images of each batch with .to(memory_format=torch.channels_last), from which torch chooses the '
        'kernels, too',
    ),
    'ColOut': Decision('works', _DATA),
    'CutMix': Decision('works', _LOSS),
    'CutOut': Decision('works', _DATA),
    'EMA': Decision(
        'translated',
        'Every rank averages the fp32 master weights that it owns, so the average is partitioned (and offloaded) like '
        'the optimizer state. Evaluation and checkpoints use the average, as in plain Composer. A checkpoint can be '
        'resumed by plain Composer on as many ranks, and by any ZeRO stage on any number. ema.get_ema_model(model) '
        'must be called on every rank.',
    ),
    'Factorize': Decision('works', _SURGERY),
    'GatedLinearUnits': Decision('works', _SURGERY),
    'GhostBatchNorm': Decision('works', _SURGERY),
    'GradientClipping': Decision(
        'translated',
        "With clipping_type='norm' it becomes gradient_clipping of the ds_config, and DeepSpeed clips. 'value' and "
        "'adaptive' are refused: gradients have moved into partitions when the algorithm would read them.",
    ),
    'GyroDropout': Decision(
        'works', 'Replaces dropout layers at FIT_START; they have no parameters. (Plain Composer refuses it on several '
        'ranks.)',
    ),
    'LabelSmoothing': Decision('works', _LOSS),
    'LayerFreezing': Decision(
        'works',
        'A frozen parameter gets no gradient and no update: no weight decay, no momentum. Its optimizer state keeps '
        'its place in memory. A checkpoint can be saved (plain Composer with torch 2.7 fails there), but not resumed '
        'with its optimizer state: give load_weights_only=True.',
    ),
    'LowPrecisionGroupNorm': Decision(
        'works', _SURGERY, 'leave apply_at out: the default, INIT, works', _late_surgery, 'apply_at=Event.INIT only'
    ),
    'LowPrecisionLayerNorm': Decision(
        'works', _SURGERY, 'leave apply_at out: the default, INIT, works', _late_surgery, 'apply_at=Event.INIT only'
    ),
    'MixUp': Decision('works', _LOSS),
    'NoOpModel': Decision('works', 'Replaces the model at INIT, before DeepSpeed takes it.'),
    'ProgressiveResizing': Decision('works', _DATA),
    'RandAugment': Decision('works', _DATA),
    'SAM': Decision(
        'refused',
        'moves the weights along p.grad and back, and takes two backward passes for each optimizer step: ZeRO has '
        'moved the gradients into partitions, has added the first pass to the second, and keeps master weights that '
        'the move does not reach',
        'train without it, or without DeepSpeed',
    ),
    'SelectiveBackprop': Decision('works', 'One more forward pass for a batch; ZeRO 3 gathers the weights for it.'),
    'SeqLengthWarmup': Decision(
        'refused',
        'makes a trial forward and backward pass beside the optimizer, and its gradients would stay in the buffers of '
        'ZeRO and be added to the first optimizer step',
        'shorten the sequences in the dataloader, or in an algorithm of yours at AFTER_DATALOADER with '
        'composer.algorithms.seq_length_warmup.set_batch_sequence_length',
    ),
    'SqueezeExcite': Decision('works', _SURGERY),
    'StochasticDepth': Decision(
        'works', _SURGERY, "use stochastic_method='sample', or zero_stage=1", _blocks_at_random,
        "stochastic_method='block' with ZeRO 1 only",
    ),
    'SWA': Decision(
        'refused',
        'copies state.model and averages its parameters, which are partitions or 16-bit copies of the master weights',
        "use EMA, which is averaged over the master weights, or average the checkpoints of the last epochs",
    ),
    'WeightStandardization': Decision('works', _SURGERY),
}  # fmt: skip
"""By the name of the class, everything in ``composer.algorithms``."""

CALLBACKS: dict[str, Decision] = {
    'ActivationMonitor': Decision('works', 'Reads activations in forward hooks; names have no `module.` in them.'),
    'CheckpointSaver': Decision('works', 'Saves whole weights and optimizer state; every rank gathers them.'),
    'CheckpointUploadCallback': Decision('works', 'Uploads files.'),
    'EarlyStopper': Decision('works', _READS),
    'ExportForInferenceCallback': Decision(
        'refused',
        'copies state.model on one rank, but the model belongs to an engine, and its weights are on all ranks',
        'load state.model.state_dict(), or a checkpoint, into a new instance of your model after training and export '
        'that (composer.utils.export_for_inference)',
    ),
    'FreeOutputs': Decision('works', 'Drops the outputs after the loss; as in plain Composer, not with train metrics.'),
    'Generate': Decision('works', 'Every rank generates; ZeRO 3 gathers the weights layer by layer.'),
    'ImageVisualizer': Decision('works', _READS),
    'LRMonitor': Decision('works', _READS),
    'LoadCheckpoint': Decision(
        'works',
        'Loads through the engine, as load_path does.',
        'use Trainer(load_path=...), or leave event out: the default, BEFORE_LOAD, works',
        _loads_too_early_or_in_the_batch,
        'not inside a batch; at INIT with load_weights_only=True only',
    ),
    'LoggerDestination': Decision('works', 'All loggers. (For WandBLogger use composer_ds.WandBLogger.)'),
    'MLPerfCallback': Decision('works', _READS + ' Not run here: it needs the package mlperf_logging.'),
    'MemoryMonitor': Decision('works', _READS + ' Measures on a GPU only.'),
    'MemorySnapshot': Decision('works', _READS + ' Records on a GPU only.'),
    'NaNMonitor': Decision('works', 'Reads the loss.'),
    'OOMObserver': Decision('works', _READS + ' Records on a GPU only.'),
    'OptimizerMonitor': Decision(
        'refused',
        'reads p.grad of the parameters, which DeepSpeed has moved into partitions by then, and would log a norm of 0',
        'use composer_ds.DeepSpeedMonitor(per_layer=True), which logs l2_norm/grad and l2_norm/update under the same '
        'keys',
    ),
    'Profiler': Decision('works', 'Records events.'),
    'RuntimeEstimator': Decision('works', _READS),
    'SpeedMonitor': Decision('works', _READS),
    'SystemMetricsMonitor': Decision('works', _READS),
    'SystemProfiler': Decision('works', 'Records the load of the machine.'),
    'ThresholdStopper': Decision('works', _READS),
    'TorchProfiler': Decision('works', "Records torch's operations, those of DeepSpeed among them."),
    'TraceHandler': Decision('works', 'Writes what the profiler records.'),
}
"""By the name of the class, everything in ``composer.callbacks``, and what the Trainer adds to its callbacks."""

TRAINER_FEATURES: dict[str, Decision] = {
    'compile_config': Decision(
        'refused',
        'compiles the forward pass around the engine, which takes it past the engine',
        'compile parts of your model before you build the Trainer: `model.encoder.compile()`',
    ),
    'ddp_sync_strategy': Decision(
        'works',
        'Has no effect: it says when DistributedDataParallel reduces gradients, and DeepSpeed reduces them itself. The '
        'weights do not depend on it.',
    ),
    'profiler': Decision('works', 'See Profiler.'),
}
"""Arguments of the Trainer that are decided like the classes."""


def decision_on(cls: type) -> tuple[type, Decision | None] | None:
    """Look a class up. A class of the user's that is derived from one of Composer's is treated like that one.

    Args:
        cls (type): The class of an algorithm or callback.

    Returns:
        tuple[type, Decision | None] | None: Composer's class, with its decision or None when it has none; None for a
        class that is the user's own.
    """
    undecided = None
    for base in cls.__mro__:
        if base.__module__.partition('.')[0] == 'composer' and not base.__module__.startswith('composer.core.'):
            decision = ALGORITHMS.get(base.__name__) or CALLBACKS.get(base.__name__)
            if decision is not None:
                return base, decision
            undecided = undecided or base
    return None if undecided is None else (undecided, None)


def problems_of_parts(parts: Sequence[Any], zero_stage: int) -> Iterator[str]:
    """Find which algorithms and callbacks would do nothing, or something wrong, beside DeepSpeed.

    Args:
        parts (Sequence[Any]): The objects in ``state.algorithms`` and ``state.callbacks``.
        zero_stage (int): 0 to 3.

    Yields:
        str: One problem each.
    """
    for part in parts:
        name = type(part).__name__
        if getattr(part, 'backwards_create_graph', False):
            yield (
                f'{name} asks for backward(create_graph=True) (backwards_create_graph): DeepSpeed copies gradients '
                'into partitions, through which nothing can be differentiated; leave it out'
            )
        found = decision_on(type(part))
        if found is None:
            continue
        base, decision = found
        if base.__name__ != name:
            name += f' (a {base.__name__})'
        if decision is None:
            yield (
                f'{name}: nobody has decided whether {base.__module__}.{base.__name__} works with DeepSpeed; it is '
                'not part of mosaicml 0.32.1, for which this version of composer_ds was made; leave it out'
            )
            continue
        problem = decision.reason if decision.verdict == 'refused' else None
        if decision.problem is not None:
            problem = decision.problem(part, zero_stage)
        if problem is not None:
            yield f'{name} does not work with DeepSpeed: it {problem}; {decision.instead}'


def problems_of_late_surgery(model: torch.nn.Module, taken: Container[torch.nn.Parameter]) -> Iterator[str]:
    """Find parameters that the model has got since DeepSpeed took it. Called at ``FIT_START``.

    Composer itself adds them when a checkpoint was trained with an algorithm that replaces layers, such as BlurPool,
    which the Trainer was not given: it applies the algorithm while it loads, after ``BEFORE_LOAD``.

    Args:
        model (torch.nn.Module): The model.
        taken (Container[torch.nn.Parameter]): The parameters that it had then.

    Yields:
        str: The problem, if there is one.
    """
    new = [name for name, parameter in model.named_parameters() if parameter not in taken]
    if new:
        some = ', '.join(new[:3]) + (', ...' if len(new) > 3 else '')
        yield (
            f'{some}: not in the model when DeepSpeed took it, and so not trained. When the checkpoint was trained '
            'with an algorithm that replaces layers, give that algorithm to the Trainer, too; replace layers before '
            'you build the Trainer otherwise'
        )
