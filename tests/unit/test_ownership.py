"""Who owns which setting. The expected values are worked out by hand from DESIGN's table of owners."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from composer.algorithms import GradientClipping, LabelSmoothing
from composer.callbacks import LRMonitor
from composer.optim import DecoupledSGDW

from composer_ds.check.facts import expected_facts
from composer_ds.conflicts import problems_of_settings
from composer_ds.errors import ConfigError
from composer_ds.facts import Settings, TrainerFacts
from composer_ds.ownership import make_plan

FACTS = TrainerFacts(
    precision='fp32',
    on_cpu=False,
    fp16_supported=True,
    world_size=2,
    batch_sizes=(8, 8),
    device_train_microbatch_size=4,
    number_of_deepspeed_algorithms=1,
    parts=(LRMonitor(), LabelSmoothing()),
    parallelism=(),
    optimizer=torch.optim.AdamW([torch.nn.Parameter(torch.zeros(4))], lr=0.01),
    optimizer_from_section=False,
    hidden_size=None,
    trained_elements=1000,
    trained_without_optimizer=(),
    frozen_parameters=(),
    float_buffers=(),
)


def settings(
    zero_stage: Any = 2, offload_optimizer: Any = None, offload_param: Any = None, **ds_config: Any
) -> Settings:
    return Settings(zero_stage, offload_optimizer, offload_param, ds_config)


def problems(given: Settings, **facts) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        make_plan(given, dataclasses.replace(FACTS, **facts))
    return caught.value.problems


def test_a_plain_plan():
    plan = make_plan(settings(), FACTS)
    assert plan.ds_config == {
        'zero_optimization': {'stage': 2, 'reduce_bucket_size': 1000},
        'managed_gradient_accumulation': False,
        'gradient_accumulation_steps': 1,
        'train_micro_batch_size_per_gpu': 4,
        'gradient_clipping': 0.0,  # nobody asked, and DeepSpeed's own default is 1.0
        'zero_allow_untested_optimizer': True,
        'zero_force_ds_cpu_optimizer': False,
    }
    assert (plan.zero_stage, plan.offload_optimizer, plan.offload_param, plan.notes) == (2, False, False, ())


def test_stage_0_runs_as_stage_1_and_says_so():
    plan = make_plan(settings(0), FACTS)
    assert plan.zero_stage == plan.ds_config['zero_optimization']['stage'] == 1
    assert 'zero_stage=0' in plan.notes[0] and 'zero_stage=1' in plan.notes[0]


def test_bf16_has_fp32_masters_and_fp32_accumulation():
    plan = make_plan(settings(), dataclasses.replace(FACTS, precision='amp_bf16'))
    assert plan.ds_config['bf16'] == {'enabled': True}
    assert plan.ds_config['data_types'] == {'grad_accum_dtype': 'fp32'}
    assert 'communication_data_type' not in plan.ds_config
    stage_1 = make_plan(settings(1), dataclasses.replace(FACTS, precision='amp_bf16'))
    assert stage_1.ds_config['communication_data_type'] == 'fp32'


def test_on_cpu_the_ds_config_may_ask_for_bf16():
    plan = make_plan(settings(bf16={'enabled': True}), dataclasses.replace(FACTS, on_cpu=True))
    assert plan.precision == 'amp_bf16' and plan.ds_config['bf16']['enabled'] is True and len(plan.notes) == 1
    assert 'disagree' in problems(settings(bf16={'enabled': True}))[0]  # on a GPU the Trainer's precision decides


@pytest.mark.parametrize('spelling', [settings(3, 'cpu', 'cpu'), settings(3, zero_optimization={
    'stage': 3, 'offload_optimizer': {'device': 'cpu'}, 'offload_param': {'device': 'cpu'}})])  # fmt: skip
def test_offload_in_either_place(spelling):
    plan = make_plan(spelling, FACTS)
    assert plan.offload_optimizer and plan.offload_param
    assert plan.ds_config['zero_optimization']['offload_param'] == {'device': 'cpu'}


def test_what_the_user_gave_is_kept_and_not_changed():
    zero = {'reduce_bucket_size': 77, 'offload_optimizer': {'pin_memory': True}}
    given = settings(2, 'cpu', zero_optimization=zero, gradient_clipping=0.5, steps_per_print=9)
    plan = make_plan(given, FACTS)
    assert plan.ds_config['gradient_clipping'] == 0.5 and plan.ds_config['steps_per_print'] == 9
    assert plan.ds_config['zero_optimization']['reduce_bucket_size'] == 77
    assert plan.ds_config['zero_optimization']['offload_optimizer'] == {'pin_memory': True, 'device': 'cpu'}
    assert zero == {'reduce_bucket_size': 77, 'offload_optimizer': {'pin_memory': True}}


def test_auto_and_agreeing_values_pass():
    given = settings(
        None, train_batch_size='auto', gradient_accumulation_steps=2, train_micro_batch_size_per_gpu=4,
        gradient_clipping='auto', bf16={'enabled': 'auto'}, fp16={'enabled': False}, zero_optimization={'stage': 2},
        optimizer={'type': 'AdamW', 'params': {'lr': 'auto', 'betas': 'auto'}},
    )  # fmt: skip
    plan = make_plan(given, FACTS)
    assert plan.ds_config == make_plan(settings(), FACTS).ds_config
    (note,) = plan.notes
    for resolved in ('train_batch_size = 16', 'gradient_clipping = 0.0', 'bf16.enabled = False', 'lr = 0.01'):
        assert resolved in note


def test_the_stage_may_stand_in_either_place():
    assert make_plan(settings(None), FACTS).zero_stage == 2
    assert make_plan(settings(None, zero_optimization={'stage': 3}), FACTS).zero_stage == 3
    assert make_plan(settings(3, zero_optimization={'stage': 3}), FACTS).zero_stage == 3


@pytest.mark.parametrize(
    ('given', 'words'),
    [
        (settings(4), ['zero_stage=4', '1, 2 and 3']),
        (settings(True), ['zero_stage=True']),
        (settings(2, 'gpu'), ["offload_optimizer='gpu'", "'cpu' and None"]),
        (settings(3, 'nvme'), ["'nvme'", 'NVMe']),
        (settings(2, None, 'cpu'), ["offload_param='cpu'", 'stage 2', 'zero_stage=3']),
        (settings(gradient_cliping=1.0), ['gradient_cliping', "'gradient_clipping'"]),
        (settings(zero_optimization={'stage': 3}), ['zero_stage=2', 'stage=3', 'disagree']),
        (settings(None, zero_optimization={'stage': 7}), ['stage=7', '0, 1, 2']),
        (settings(2, 'cpu', zero_optimization={'offload_optimizer': {'device': 'none'}}), ["'cpu'", "'none'"]),
        (settings(zero_optimization={'offload_optimizer': {'device': 'nvme'}}), ['nvme']),
        (settings(1, zero_optimization={'overlap_comm': True}), ['overlap_comm']),
        (settings(gradient_clipping=-1), ['gradient_clipping=-1']),
        (settings(gradient_clipping=float('nan')), ['gradient_clipping=nan']),
        (settings(zero_optimization=[]), ['zero_optimization']),
        (settings(zero_optimization=True), ['zero_optimization=True', 'mapping']),  # an old form of DeepSpeed's
    ],
)
def test_wrong_settings(given: Settings, words: list[str]):
    (problem,) = problems_of_settings(given)
    assert all(word in problem for word in words), problem


class LAMB(torch.optim.SGD):
    """Not element-wise, were it the real one."""


class Mine(torch.optim.SGD):
    """An optimizer that composer_ds has not heard of."""


def optimizer(cls: Any = torch.optim.AdamW, **arguments: Any) -> torch.optim.Optimizer:
    return cls([torch.nn.Parameter(torch.zeros(4))], lr=0.01, **arguments)


WARMUP = {'type': 'WarmupLR', 'params': {'warmup_num_steps': 700}}


@pytest.mark.parametrize(
    ('given', 'facts', 'words'),
    [
        (settings(), {'number_of_deepspeed_algorithms': 2}, ['2 DeepSpeed instances']),
        (settings(), {'parallelism': ('fsdp',)}, ['parallelism_config', "'fsdp'"]),
        (settings(), {'precision': 'amp_fp8'}, ["'amp_fp8'", "'amp_bf16'"]),
        (settings(), {'precision': 'amp_fp16', 'fp16_supported': False}, ["precision='amp_fp16'", 'default on a GPU']),
        (settings(), {'device_train_microbatch_size': 'auto'}, ["device_train_microbatch_size='auto'"]),
        (settings(), {'optimizer': None}, ['no optimizer']),
        (settings(), {'optimizer': optimizer(LAMB)}, ['LAMB', 'norms']),
        (settings(zero_allow_untested_optimizer=True), {'optimizer': optimizer(LAMB)}, ['LAMB', 'norms']),
        (settings(), {'optimizer': optimizer(Mine)}, ['Mine', 'zero_allow_untested_optimizer']),
        (settings(), {'optimizer': optimizer(torch.optim.Adagrad)}, ['Adagrad', 'ignores the schedule']),
        (settings(zero_allow_untested_optimizer=False), {'optimizer': optimizer(torch.optim.SGD)}, ['SGD', 'tested']),
        (settings(2, 'cpu', zero_force_ds_cpu_optimizer=True), {}, ['AdamW', 'DeepSpeedCPUAdam']),
        (settings(), {'trained_without_optimizer': ('a.weight',)}, ['a.weight', 'requires_grad=False']),
        (settings(), {'strided_parameters': ('conv.weight',)}, ['conv.weight', 'contiguous_format']),
        (settings(), {'scheduler_classes': ('ReduceLROnPlateau',)}, ['ReduceLROnPlateau', 'metric']),
        (settings(bf16={'enabled': True}), {}, ["precision='fp32'", 'bf16.enabled=True']),
        (settings(bf16={}), {'precision': 'amp_bf16'}, ["precision='amp_bf16'", 'bf16.enabled=False']),
        (settings(fp16={'enabled': False}), {'precision': 'amp_fp16'}, ["'amp_fp16'", 'fp16.enabled=False']),
        (settings(torch_autocast={'enabled': True}), {}, ["precision='fp32'", 'torch_autocast.enabled=True']),
        (
            settings(torch_autocast={'enabled': True, 'dtype': 'float16'}),
            {'precision': 'amp_bf16'},
            ["dtype='float16'", "'amp_bf16'", 'loss scale'],
        ),
        (
            settings(torch_autocast={'enabled': True}, bf16={'enabled': True}),
            {'precision': 'amp_bf16'},
            ['bf16.enabled=True', 'torch_autocast.enabled=True', 'leave one out'],
        ),
        (settings(train_micro_batch_size_per_gpu=8), {}, ['device_train_microbatch_size=4', '=8']),
        (settings(gradient_clipping=1.0), {'parts': (GradientClipping('norm', 0.5),)}, ["'norm', 0.5", '=1.0']),
        (settings(), {'parts': (GradientClipping('value', 0.5),)}, ["'value', 0.5", "'norm'"]),
        (settings(), {'parts': (GradientClipping('adaptive', 0.5),)}, ["'adaptive', 0.5", "'norm'"]),
        (settings(), {'parts': (GradientClipping('norm', 0.0),)}, ["'norm', 0.0", 'greater than 0']),
        (settings(), {'parts': (GradientClipping('norm', 1.0),) * 2}, ['2 GradientClipping']),
        (settings(optimizer={'type': 'AdamW', 'params': {'lr': 0.1}}), {}, ['lr=0.1 (Trainer: 0.01)', 'owner']),
        (settings(optimizer={'type': 'Adam', 'params': {'lr': 'auto'}}), {}, ['AdamW', "type='Adam'"]),
        (settings(scheduler=WARMUP), {}, ['WarmupLR', "ConstantWithWarmupScheduler(t_warmup='700ba')"]),
        (settings(scheduler=WARMUP), {'scheduler_classes': ('LambdaLR',)}, ['WarmupLR', 'Trainer(schedulers=']),
        (settings(scheduler={'type': 'WarmupLR', 'params': {'warmup_num_steps': 'auto'}}), {}, ['WarmupLR']),
        (settings(zero_optimization={'sub_group_size': 'auto'}), {}, ['sub_group_size', "'auto'"]),
    ],
)
def test_conflicts_with_the_trainer(given: Settings, facts: dict, words: list[str]):
    (problem,) = problems(given, **facts)
    assert all(word in problem for word in words), problem


def test_a_schedule_that_is_left_to_the_trainer():
    section = {'type': 'WarmupLR', 'params': {'warmup_num_steps': 'auto', 'warmup_max_lr': 'auto'}}
    plan = make_plan(settings(scheduler=section), dataclasses.replace(FACTS, scheduler_classes=('LambdaLR',)))
    assert 'scheduler' not in plan.ds_config and "the Trainer's schedule" in plan.notes[0]


def test_all_conflicts_at_once():
    given = settings(2, None, 'cpu', train_batch_size=65, scheduler=WARMUP, misspelt=1)
    several = {'precision': 'amp_fp8', 'optimizer': optimizer(LAMB), 'parallelism': ('tp',)}
    assert len(problems(given, **several)) == 7
    with pytest.raises(ConfigError, match='7 problems'):
        make_plan(given, dataclasses.replace(FACTS, **several))


def test_an_element_wise_optimizer_of_the_users_own():
    given = settings(zero_allow_untested_optimizer=True)
    assert make_plan(given, dataclasses.replace(FACTS, optimizer=optimizer(Mine))).zero_stage == 2


def test_clipping_of_composer_becomes_that_of_deepspeed():
    plan = make_plan(settings(), dataclasses.replace(FACTS, parts=(GradientClipping('norm', 0.25),)))
    assert plan.ds_config['gradient_clipping'] == 0.25 and 'GradientClipping' in plan.notes[0]
    both = make_plan(
        settings(gradient_clipping=0.25), dataclasses.replace(FACTS, parts=(GradientClipping('norm', 0.25),))
    )
    assert both.ds_config == plan.ds_config


@pytest.mark.parametrize(
    ('offload', 'given', 'fused'),
    [
        ('cpu', optimizer(), True),
        ('cpu', optimizer(torch.optim.Adam), True),
        (None, optimizer(), False),  # the GPU has kernels of its own
        ('cpu', optimizer(fused=False), False),
        ('cpu', optimizer(foreach=True), False),
        ('cpu', optimizer(torch.optim.SGD), False),
        ('cpu', DecoupledSGDW([torch.nn.Parameter(torch.zeros(4))], lr=0.1), False),
    ],
)
def test_which_optimizers_torchs_fused_kernel_runs(offload, given, fused: bool):
    assert make_plan(settings(2, offload), dataclasses.replace(FACTS, optimizer=given)).fused_adam is fused


def test_fp16_has_fp32_masters_and_keeps_the_users_loss_scale():
    given = settings(1, fp16={'enabled': 'auto', 'loss_scale_window': 50})
    plan = make_plan(given, dataclasses.replace(FACTS, precision='amp_fp16'))
    assert plan.ds_config['fp16'] == {'enabled': True, 'loss_scale_window': 50}
    assert plan.ds_config['data_types'] == {'grad_accum_dtype': 'fp32'}
    assert (plan.weights, plan.autocast_dtype) == ('fp16', torch.float16)


def test_autocast_keeps_fp32_weights():
    given = settings(torch_autocast={'enabled': True})
    plan = make_plan(given, dataclasses.replace(FACTS, precision='amp_bf16'))
    assert plan.ds_config['torch_autocast']['dtype'] == 'bfloat16'
    assert 'bf16' not in plan.ds_config and plan.weights == 'fp32'


def test_what_is_rounded_is_said():
    facts = dataclasses.replace(
        FACTS, precision='amp_bf16', frozen_parameters=('base.weight',), float_buffers=('rotary.inv_freq',)
    )
    (about_parameters,) = make_plan(settings(), facts).notes
    assert 'base.weight' in about_parameters and 'buffer' in about_parameters
    _, about_buffers = make_plan(settings(data_types={'buffer_dtype': 'bf16'}), facts).notes
    assert 'rotary.inv_freq' in about_buffers and 'keep_in_fp32_modules' in about_buffers
    assert make_plan(settings(), dataclasses.replace(facts, precision='fp32')).notes == ()


def test_the_table_of_decisions():
    given = settings(3, zero_optimization={'offload_optimizer': {'device': 'cpu'}, 'sub_group_size': 99})
    rows = {row.setting: row for row in make_plan(given, FACTS).decisions}
    assert rows['ZeRO stage'].value == 3 and rows['ZeRO stage'].source == 'zero_stage=3'
    assert rows['offload optimizer'].source == 'ds_config.zero_optimization.offload_optimizer'
    assert rows['gradient clipping'].value == 'none' and rows['gradient clipping'].source == 'nobody asked'
    assert rows['accumulation'].value == 2 and rows['global batch'].value == 16
    assert rows['zero_optimization.sub_group_size'].owner == 'DeepSpeed'
    assert rows['zero_optimization.reduce_bucket_size'].owner == 'composer_ds'


def test_a_check_without_a_trainer_sees_the_model_as_a_trainer_does():
    model = torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    facts = expected_facts(
        world_size=2, precision='fp32', on_cpu=True, batch_size=8, microbatch_size=4, model=model,
        optimizer=torch.optim.SGD([model.weight], lr=0.1),
    )  # fmt: skip
    assert facts.strided_parameters == ('weight',) and facts.trained_without_optimizer == ('bias',)
    assert facts.trained_elements == 2 * 3 * 9 + 3
