"""Evaluation, prediction and text generation, where ranks have different work. Runs inside rank processes."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import transformers
from composer import Callback, ComposerModel, DataSpec, Evaluator, State, Trainer
from composer.callbacks import Generate
from composer.loggers import Logger, LoggerDestination
from composer.models import HuggingFaceModel
from composer.utils import dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy

from composer_ds import DeepSpeed
from tests.distributed.parity_cases import STRATEGIES, FindUnusedParameters, weights_of

Batch = list[torch.Tensor]


class _Batches(IterableDataset):
    """Batches that are ready; this rank's own."""

    def __init__(self, batches: list[Any]):
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self):
        # Hugging Face models take the labels out of a batch.
        return iter(copy.deepcopy(self.batches))


def _of_this_rank(*sizes_by_rank: list[int]) -> DataLoader:
    """A dataloader with batches of the given sizes; ranks beyond those named begin again with the first."""
    rank = dist.get_global_rank()
    sizes = sizes_by_rank[rank % len(sizes_by_rank)]
    generator = torch.Generator().manual_seed(100 + rank)
    batches = [
        [torch.randn(size, 5, generator=generator), torch.randint(0, 3, (size,), generator=generator)] for size in sizes
    ]
    return DataLoader(_Batches(batches), batch_size=None)


def _sampled(count: int) -> DataLoader:
    """A dataloader whose sampler repeats a sample where the ranks cannot share evenly, which Composer corrects."""
    generator = torch.Generator().manual_seed(4)
    samples = [(torch.randn(5, generator=generator), torch.tensor(index % 3)) for index in range(count)]
    return DataLoader(samples, batch_size=4, sampler=dist.get_sampler(samples, shuffle=False))  # pyright: ignore


class _Inner(nn.Module):
    """Uses the weight of another module of its own, as output layers that are tied to the embedding do."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(9, 9)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(torch.tanh(self.mix(hidden)), self.mix.weight)


class Network(ComposerModel):
    """With weights that are used away from their module, random numbers in evaluation, and a buffer that counts."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((5,), 1.5))
        self.first = nn.Linear(5, 9)
        self.inner = _Inner()
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(5, 3)
        self.register_buffer('calls', torch.zeros(1))

    def forward(self, batch: Batch) -> torch.Tensor:
        self.calls = self.calls + 1  # another tensor
        hidden = self.dropout(self.inner(torch.tanh(self.first(batch[0]))))
        hidden = nn.functional.dropout(hidden, 0.2, training=True)
        return self.head((hidden @ self.first.weight) * self.scale)

    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])

    def eval_forward(self, batch: Batch, outputs: Any = None) -> torch.Tensor:
        # Not with the outputs of training, which Composer offers for train metrics. HuggingFaceModel, too, changes the
        # batch.
        batch[0].add_(0.5)
        return self.forward(batch) * self.scale[:3]

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        return {'Accuracy': MulticlassAccuracy(3, average='micro'), 'Square': MeanMetric(nan_strategy='ignore')}

    def update_metric(self, batch: Batch, outputs: torch.Tensor, metric: Any) -> None:
        if isinstance(metric, MeanMetric):
            metric.update(outputs.square())
        else:
            metric.update(outputs, batch[1])


class _Values(Callback):
    """Keeps each metric's value at the end of each evaluation, and the train metrics of each batch."""

    def __init__(self):
        self.values: list[tuple[str, float]] = []

    def _keep(self, label: str, metrics: dict[str, Metric]) -> None:
        self.values += [(f'{label} {name}', float(metric.compute())) for name, metric in metrics.items()]

    def eval_end(self, state: State, logger: Logger) -> None:
        assert state.dataloader_label is not None
        self._keep(state.dataloader_label, state.eval_metrics[state.dataloader_label])
        self.values.append((f'{state.dataloader_label} samples', float(state.eval_timestamp.sample)))

    def batch_end(self, state: State, logger: Logger) -> None:
        assert state.train_metrics is not None
        self._keep('train', state.train_metrics)


def _deepspeed(strategy: str | None, **sections: Any) -> list[Any]:
    if strategy is None:
        return []
    settings = copy.deepcopy(STRATEGIES[strategy])
    settings['ds_config'] = {**settings.get('ds_config', {}), **sections}
    return [DeepSpeed(**settings)]


def _trainer(model: ComposerModel, algorithms: list[Any], **arguments: Any) -> Trainer:
    return Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        device='cpu',
        algorithms=algorithms,
        progress_bar=False,
        seed=5,
        **arguments,
    )


def _network() -> Network:
    torch.manual_seed(17)
    return Network()


def evaluations(strategy: str | None) -> dict[str, Any]:
    """Evaluate before, within and after training, and predict; the ranks differ in batches and in microbatches."""
    evaluator = functools.partial(Evaluator, metric_names=['Accuracy', 'Square'])
    evaluators = [
        evaluator(label='equal', dataloader=_of_this_rank([4, 4, 3]), device_eval_microbatch_size=4),
        evaluator(label='batches', dataloader=_of_this_rank([4] * 3, [4] * 5), device_eval_microbatch_size=4),
        evaluator(label='none', dataloader=_of_this_rank([4, 4], []), device_eval_microbatch_size=4),
        evaluator(label='microbatches', dataloader=_of_this_rank([5, 2], [2, 7]), device_eval_microbatch_size=2),
        evaluator(label='sampled', dataloader=_sampled(11)),
        evaluator(label='subset', dataloader=_sampled(40), subset_num_batches=2),
    ]
    values = _Values()
    network = _network()
    trainer = _trainer(
        network,
        _deepspeed(strategy),
        train_dataloader=_of_this_rank([4, 4, 2], [4, 1, 4]),
        device_train_microbatch_size=2,
        max_duration='6ba',
        eval_dataloader=evaluators,
        eval_interval='2ba',
        callbacks=[values],
    )
    found: dict[str, Any] = {'start': weights_of(trainer)}
    trainer.eval()
    trainer.fit()
    found['predictions'] = trainer.predict(_of_this_rank([4, 3], [2, 5, 4]))
    found['some'] = trainer.predict(_of_this_rank([4, 3, 2]), subset_num_batches=2)
    assert trainer.predict(_of_this_rank([4], []), return_outputs=False) == []
    trainer.eval(evaluator(label='later', dataloader=_of_this_rank([3], [6]), device_eval_microbatch_size=2))
    found |= {'weights': weights_of(trainer), 'values': values.values, 'random': torch.rand(3)}
    trainer.close()
    assert 'eval_forward' not in vars(network) and network.eval_forward.__func__ is Network.eval_forward  # pyright: ignore
    return found


class Failing(Network):
    """Fails in the midst of its evaluation, once."""

    fails = True

    def eval_forward(self, batch: Batch, outputs: Any = None) -> torch.Tensor:
        outputs = self.forward(batch)
        if self.fails:
            self.fails = False
            self.head(torch.zeros(2, 77))  # the wrong shape
        return outputs * self.scale[:3]


def evaluation_after_an_error(strategy: str | None) -> float:
    """Evaluate again, after evaluation has failed on every rank."""
    torch.manual_seed(17)
    network = Failing()
    trainer = _trainer(network, _deepspeed(strategy))
    evaluator = Evaluator(label='eval', dataloader=_of_this_rank([4, 2]), device_eval_microbatch_size=4)
    try:
        trainer.eval(evaluator)
    except RuntimeError as error:
        assert '77' in str(error)
    else:
        raise AssertionError('evaluation was to fail')
    trainer.state.evaluators.clear()
    if strategy is not None:
        from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

        assert FWD_MODULE_STACK[-1] is network
        assert not any(module._parameters._in_forward for module in network.modules())  # pyright: ignore
        assert network.scale.numel() == 0, 'the parameter of the root is still gathered'
    torch.manual_seed(3)
    trainer.eval(evaluator)
    value = float(trainer.state.eval_metrics['eval']['Square'].compute())
    assert strategy is None or network.scale.numel() == 0
    trainer.close()
    return value


def bf16_evaluation(strategy: str) -> tuple[dict[str, float], dict[str, float]]:
    """Evaluate in bf16, whose metrics keep their own dtype; beside it what a bare bf16 model finds under autocast."""
    values, network = _Values(), _network()
    evaluator = Evaluator(
        label='eval', dataloader=_of_this_rank([5, 2], [2, 7]), metric_names=['Accuracy', 'Square'],
        device_eval_microbatch_size=2,
    )  # fmt: skip
    trainer = _trainer(
        network,
        _deepspeed(strategy, bf16={'enabled': True}),
        train_dataloader=_of_this_rank([4, 2]),
        device_train_microbatch_size=2,
        max_duration='2ba',
        eval_dataloader=evaluator,
        callbacks=[values],
    )
    trainer.fit()
    del values.values[:]
    torch.manual_seed(3)
    trainer.eval()
    weights = weights_of(trainer)
    trainer.close()
    bare = Network()
    bare.load_state_dict(weights)
    for parameter in bare.parameters():
        parameter.data = parameter.data.bfloat16()
    bare.eval()
    torch.manual_seed(3)
    metrics = bare.get_metrics(is_train=False)
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
        for batch in evaluator.dataloader.dataloader:
            for microbatch in evaluator.dataloader.split_batch(batch, 2):
                outputs = bare.eval_forward(microbatch)  # pyright: ignore[reportArgumentType]
                for metric in metrics.values():
                    bare.update_metric(microbatch, outputs, metric)  # pyright: ignore[reportArgumentType]
    expected = {f'eval {name}': float(metric.compute()) for name, metric in metrics.items()}
    return {name: value for name, value in values.values if name in expected}, expected


class Texts(Metric):
    """A number that changes with each text, and with the order of a rank's texts."""

    def __init__(self):
        super().__init__()
        self.add_state('count', torch.tensor(0), dist_reduce_fx='sum')
        self.add_state('total', torch.tensor(0), dist_reduce_fx='sum')

    def update(self, outputs: list[str], labels: torch.Tensor) -> None:
        for text in outputs:
            self.count += 1
            self.total += self.count * sum((place + 1) * ord(letter) for place, letter in enumerate(text))

    def compute(self) -> torch.Tensor:
        return self.total


class _Tables(LoggerDestination):
    """Keeps what Composer's Generate logs, which it does on rank 0."""

    def __init__(self):
        self.rows: list[Any] = []

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = 'Table', step: int | None = None
    ) -> None:
        self.rows += rows


class _EndAt(transformers.LogitsProcessor):
    """Lets every sequence end when it has so many tokens."""

    def __init__(self, length: int, eos_token_id: int):
        self.length = length
        self.eos_token_id = eos_token_id

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if input_ids.shape[1] >= self.length:
            scores = scores.clone()  # pyright: ignore[reportAssignmentType]
            scores[:] = -float('inf')
            scores[:, self.eos_token_id] = 0
        return scores


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: index for index, word in enumerate(['<pad>', '<end>', '<unk>', *'abcdefghijklmnopqrstuvwxyz'])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token='<unk>'))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token='<pad>', eos_token='<end>', unk_token='<unk>'
    )


def _language_model(peft: bool) -> HuggingFaceModel:
    torch.manual_seed(17)
    tokenizer = _tokenizer()
    config = transformers.GPT2Config(
        vocab_size=29, n_positions=40, n_embd=16, n_layer=1, n_head=2, eos_token_id=1, pad_token_id=0, bos_token_id=1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.5,
    )  # fmt: skip
    inner = transformers.GPT2LMHeadModel(config)
    peft_config: Any = None
    if peft:
        from peft import LoraConfig

        peft_config = LoraConfig(r=2, target_modules=['c_attn'], init_lora_weights=False, task_type='CAUSAL_LM')
    return HuggingFaceModel(
        inner,
        tokenizer,
        eval_metrics=[Texts()],
        shift_labels=True,
        peft_config=peft_config,
        should_save_peft_only=False,
    )


def imported() -> None:
    """Import what the cases need, which takes longer than they do."""
    _language_model(peft=True)


def _prompts() -> tuple[torch.Tensor, int]:
    """This rank's prompts, and the number of tokens at which its sequences are to end."""
    rank = dist.get_global_rank()
    generator = torch.Generator().manual_seed(30 + rank)
    return torch.randint(3, 29, (2, 4), generator=generator), 5 + 4 * (rank % 2)


def generations(strategy: str | None, peft: bool = False) -> dict[str, Any]:
    """Generate in all ways; the sequences of the second rank are longer than those of the first."""
    model = _language_model(peft)
    ids, length = _prompts()
    inputs: dict[str, Any] = {'input_ids': ids, 'attention_mask': torch.ones_like(ids)}
    ending: dict[str, Any] = {
        'max_new_tokens': 20,
        'do_sample': False,
        'logits_processor': transformers.LogitsProcessorList([_EndAt(length, 1)]),
    }
    generating = {
        **inputs,
        'labels': ids.clone(),
        'mode': 'generate',
        'generation_kwargs': {'max_new_tokens': length - 4, 'do_sample': False},
    }
    training = {**inputs, 'labels': ids.clone()}
    callback = Generate(['a b c', 'd'], interval='1ba', **ending)
    tables = _Tables()
    values: dict[str, Any] = {}
    generated = DataSpec(
        DataLoader(_Batches([generating]), batch_size=None), get_num_samples_in_batch=lambda b: len(b['input_ids'])
    )
    trainer = _trainer(
        model,
        _deepspeed(strategy) or [FindUnusedParameters()],
        train_dataloader=DataLoader(_Batches([training]), batch_size=None),
        device_train_microbatch_size=2,
        max_duration='1ba',
        eval_dataloader=Evaluator(label='text', dataloader=generated, device_eval_microbatch_size=2),
        eval_interval='1ba',
        callbacks=[callback],
        loggers=[tables],
    )

    hugging_face: Any = model.model
    values['before'] = hugging_face.generate(**inputs, **ending, pad_token_id=0)
    trainer.fit()
    values['metric in fit'] = int(trainer.state.eval_metrics['text']['Texts'].compute())
    face: Any = trainer.state.model.module if trainer.state.is_model_ddp else trainer.state.model
    values['after'] = face.generate(**inputs, **ending)
    trainer.eval()
    values['metric'] = int(trainer.state.eval_metrics['text']['Texts'].compute())
    values['weights'] = weights_of(trainer)
    values['table'] = tables.rows
    trainer.close()
    for module in model.modules():
        assert 'generate' not in vars(module) and '_is_fsdp_managed_module' not in vars(module)
    return values


def bf16_generation(strategy: str) -> None:
    """Tokens generated beside the engine in bf16 are those of a bare model with bf16 weights, under autocast."""
    model = _language_model(peft=False)
    ids, length = _prompts()
    trainer = _trainer(model, _deepspeed(strategy, bf16={'enabled': True}))
    dtypes = []
    hugging_face: Any = model.model
    handle = hugging_face.register_forward_hook(lambda *_: dtypes.append(torch.is_autocast_enabled('cpu')))
    ending: dict[str, Any] = {
        'attention_mask': torch.ones_like(ids),
        'do_sample': False,
        'max_new_tokens': 20,
        'logits_processor': transformers.LogitsProcessorList([_EndAt(length, 1)]),
    }
    found = hugging_face.generate(ids, **ending)
    handle.remove()
    assert dtypes and all(dtypes) and not torch.is_autocast_enabled('cpu')
    weights = weights_of(trainer)
    trainer.close()
    bare = _language_model(peft=False)
    bare.load_state_dict(weights)
    inner: Any = bare.model
    inner.to(torch.bfloat16).eval()
    with torch.autocast('cpu', torch.bfloat16):
        torch.testing.assert_close(found, inner.generate(ids, **ending))
