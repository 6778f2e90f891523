"""Training with Composer's callbacks, plain and under DeepSpeed. Runs inside rank processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from composer import Callback, algorithms, callbacks
from composer.core import Event
from composer.loggers import InMemoryLogger, LoggerDestination
from composer.models import HuggingFaceModel
from composer.profiler import JSONTraceHandler, Profiler, cyclic_schedule
from composer.utils import dist

from composer_ds import DeepSpeed
from tests.distributed.algorithm_cases import Small, fit, images, loader, tokens, trainer_of


class _Probe(Callback):
    """The norm of the gradient, from ``p.grad`` in plain Composer, and from what the docs name instead."""

    def __init__(self):
        self.norms: list[float] = []

    def batch_end(self, state, logger):
        ours: list[Any] = [algorithm for algorithm in state.algorithms if isinstance(algorithm, DeepSpeed)]
        if ours:
            norm = ours[0].ds_engine.get_global_grad_norm()
        else:
            gradients = [p.grad for p in state.model.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
        self.norms.append(float(norm))


def monitors(strategy: str | None, folder: str) -> dict[str, Any]:
    """Train with every callback that only reads, and return what they log."""
    log, probe = InMemoryLogger(), _Probe()
    torch.manual_seed(17)
    dataset = images()
    trainer = trainer_of(
        strategy,
        [algorithms.LabelSmoothing(0.1)],
        Small(with_metrics=True),
        dataset,
        eval_dataloader=loader(dataset),
        loggers=[log],
        callbacks=[
            callbacks.ActivationMonitor(interval='1ba', only_log_wandb=False),
            callbacks.ImageVisualizer(interval='1ba'),
            callbacks.LRMonitor(),
            callbacks.MemoryMonitor(),
            callbacks.MemorySnapshot(),
            callbacks.NaNMonitor(),
            callbacks.OOMObserver(),
            callbacks.RuntimeEstimator(skip_batches=0),
            callbacks.SpeedMonitor(window_size=2),
            callbacks.SystemMetricsMonitor(),
            probe,
        ],
        profiler=Profiler(
            cyclic_schedule(wait=0, warmup=0, active=2, repeat=1),
            [JSONTraceHandler(folder=folder, merged_trace_filename=None, overwrite=True)],
            torch_prof_folder=f'{folder}/torch',
            torch_prof_remote_file_name=None,
        ),
        ddp_sync_strategy='forced_sync',
    )
    weights = fit(trainer)
    trace = Path(folder) / f'ep0-ba2-rank{dist.get_global_rank()}.json'
    return {
        'weights': weights,
        'norms': probe.norms,
        'traced': {event['name'] for event in json.loads(trace.read_text()) if event['name'].startswith('event/')},
        'logged': {
            key.replace('/module.', '/').replace('/module_', '/_'): [_number(value) for _, value in values]
            for key, values in log.data.items()
            if not key.startswith('algorithm_traces')
        },
    }


def _number(value: Any) -> float | str:
    try:
        return float(value)
    except (TypeError, ValueError):
        return type(value).__name__


def stoppers(strategy: str | None) -> dict[str, Any]:
    """After how many batches each callback stops a training of twenty, or what it raises."""
    found: dict[str, Any] = {}
    for name, callback in {
        'early': callbacks.EarlyStopper('Accuracy', 'train', comp='less', min_delta=10.0, patience='2ba'),
        'threshold': callbacks.ThresholdStopper('Accuracy', 'eval', threshold=-1.0, comp='gt'),
        'free': callbacks.FreeOutputs(),
        'nan': callbacks.NaNMonitor(),
    }.items():
        torch.manual_seed(17)
        dataset = images()
        if name == 'nan':
            dataset.tensors[0][:] = float('nan')
        with_metrics = name in ('early', 'threshold')
        trainer = trainer_of(
            strategy,
            model=Small(with_metrics),
            dataset=dataset,
            callbacks=[callback],
            eval_dataloader=loader(images()) if with_metrics else None,
        )
        try:
            trainer.fit()
        except RuntimeError as error:
            found[f'{name} raises'] = str(error)
        found[name] = int(trainer.state.timestamp.batch)
        trainer.close()
    return found


def load_checkpoint(strategy: str | None, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    """Train on from a checkpoint of plain Composer that ``LoadCheckpoint`` loads at each event that is allowed."""
    path = Path(folder) / 'saved.pt'
    if not path.exists():
        trainer = trainer_of(None, max_duration='1ep')
        trainer.fit()
        trainer.save_checkpoint(str(path))
        trainer.close()
    found = {}
    for event in (Event.INIT, Event.BEFORE_LOAD, Event.AFTER_LOAD, Event.FIT_START):
        torch.manual_seed(3)
        callback = callbacks.LoadCheckpoint(str(path), load_weights_only=event == Event.INIT, event=event)
        found[event.name] = fit(trainer_of(strategy, model=Small(), callbacks=[callback]))
    return found


class _Tables(LoggerDestination):
    def __init__(self):
        self.rows: list[Any] = []

    def log_table(self, columns, rows, name='Table', step=None):
        self.rows.append(rows)


def generate(strategy: str | None) -> dict[str, Any]:
    """Generate text every few batches with a tiny T5."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

    words = {word: index for index, word in enumerate(['<pad>', '</s>', '<unk>', *'abcdefghijklmnopq'])}
    inner = Tokenizer(models.WordLevel(words, unk_token='<unk>'))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token='<pad>', eos_token='</s>', unk_token='<unk>', model_max_length=16
    )
    torch.manual_seed(17)
    config = T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0)
    config.decoder_start_token_id = 0
    model = HuggingFaceModel(T5ForConditionalGeneration(config), tokenizer=tokenizer, use_logits=True)
    log = _Tables()
    trainer = trainer_of(
        strategy,
        model=model,
        dataset=tokens(),
        loggers=[log],
        callbacks=[
            callbacks.Generate(['a b c', 'd e f g', 'h'], '2ba', batch_size=2, max_new_tokens=5, do_sample=True)
        ],
    )
    weights = fit(trainer)
    return {'weights': weights, 'tables': log.rows}
