"""The names that a YAML may use for optimizers, schedulers, algorithms, callbacks and loggers.

Each name stands for an import path, `module:Class`, so that only the classes a run names are imported.
"""

from __future__ import annotations

__all__ = ['ALGORITHMS', 'CALLBACKS', 'LOGGERS', 'NEEDS_DEEPSPEED', 'OPTIMIZERS', 'SCHEDULERS']

OPTIMIZERS = {
    'adamw': 'torch.optim:AdamW',
    'adam': 'torch.optim:Adam',
    'sgd': 'torch.optim:SGD',
    'decoupled_adamw': 'composer.optim:DecoupledAdamW',
    'decoupled_sgdw': 'composer.optim:DecoupledSGDW',
}

SCHEDULERS = {
    'constant': 'composer.optim:ConstantScheduler',
    'constant_with_warmup': 'composer.optim:ConstantWithWarmupScheduler',
    'linear': 'composer.optim:LinearScheduler',
    'linear_with_warmup': 'composer.optim:LinearWithWarmupScheduler',
    'cosine': 'composer.optim:CosineAnnealingScheduler',
    'cosine_with_warmup': 'composer.optim:CosineAnnealingWithWarmupScheduler',
    'cosine_warm_restarts': 'composer.optim:CosineAnnealingWarmRestartsScheduler',
    'polynomial': 'composer.optim:PolynomialScheduler',
    'polynomial_with_warmup': 'composer.optim:PolynomialWithWarmupScheduler',
    'exponential': 'composer.optim:ExponentialScheduler',
    'step': 'composer.optim:StepScheduler',
    'multi_step': 'composer.optim:MultiStepScheduler',
    'multi_step_with_warmup': 'composer.optim:MultiStepWithWarmupScheduler',
}

# DeepSpeed is missing on purpose: the section `deepspeed` makes it.
ALGORITHMS = {
    'alibi': 'composer.algorithms:Alibi',
    'augmix': 'composer.algorithms:AugMix',
    'blurpool': 'composer.algorithms:BlurPool',
    'channels_last': 'composer.algorithms:ChannelsLast',
    'colout': 'composer.algorithms:ColOut',
    'cutmix': 'composer.algorithms:CutMix',
    'cutout': 'composer.algorithms:CutOut',
    'ema': 'composer.algorithms:EMA',
    'factorize': 'composer.algorithms:Factorize',
    'gated_linear_units': 'composer.algorithms:GatedLinearUnits',
    'ghost_batchnorm': 'composer.algorithms:GhostBatchNorm',
    'gradient_clipping': 'composer.algorithms:GradientClipping',
    'gyro_dropout': 'composer.algorithms:GyroDropout',
    'label_smoothing': 'composer.algorithms:LabelSmoothing',
    'layer_freezing': 'composer.algorithms:LayerFreezing',
    'low_precision_groupnorm': 'composer.algorithms:LowPrecisionGroupNorm',
    'low_precision_layernorm': 'composer.algorithms:LowPrecisionLayerNorm',
    'mixup': 'composer.algorithms:MixUp',
    'no_op_model': 'composer.algorithms:NoOpModel',
    'progressive_resizing': 'composer.algorithms:ProgressiveResizing',
    'randaugment': 'composer.algorithms:RandAugment',
    'sam': 'composer.algorithms:SAM',
    'selective_backprop': 'composer.algorithms:SelectiveBackprop',
    'seq_length_warmup': 'composer.algorithms:SeqLengthWarmup',
    'squeeze_excite': 'composer.algorithms:SqueezeExcite',
    'stochastic_depth': 'composer.algorithms:StochasticDepth',
    'swa': 'composer.algorithms:SWA',
    'weight_standardization': 'composer.algorithms:WeightStandardization',
}

# CheckpointSaver is missing on purpose: the section `checkpoint` makes it.
CALLBACKS = {
    'activation_monitor': 'composer.callbacks:ActivationMonitor',
    'communication_monitor': 'composer_ds.callbacks.communication_monitor:CommunicationMonitor',
    'consolidated_weights_saver': 'composer_ds.callbacks.consolidated_weights:ConsolidatedWeightsSaver',
    'deepspeed_monitor': 'composer_ds.callbacks.deepspeed_monitor:DeepSpeedMonitor',
    'early_stopper': 'composer.callbacks:EarlyStopper',
    'free_outputs': 'composer.callbacks:FreeOutputs',
    'generate': 'composer.callbacks:Generate',
    'load_checkpoint': 'composer.callbacks:LoadCheckpoint',
    'lr_monitor': 'composer.callbacks:LRMonitor',
    'memory_monitor': 'composer.callbacks:MemoryMonitor',
    'memory_snapshot': 'composer.callbacks:MemorySnapshot',
    'nan_monitor': 'composer.callbacks:NaNMonitor',
    'oom_observer': 'composer.callbacks:OOMObserver',
    'optimizer_monitor': 'composer.callbacks:OptimizerMonitor',
    'runtime_estimator': 'composer.callbacks:RuntimeEstimator',
    'sharded_checkpoint_saver': 'composer_ds.callbacks.sharded_checkpoint_saver:ShardedCheckpointSaver',
    'speed_monitor': 'composer.callbacks:SpeedMonitor',
    'system_metrics_monitor': 'composer.callbacks:SystemMetricsMonitor',
    'threshold_stopper': 'composer.callbacks:ThresholdStopper',
    'zero_memory_monitor': 'composer_ds.callbacks.zero_memory_monitor:ZeroMemoryMonitor',
}

NEEDS_DEEPSPEED = frozenset(
    {'communication_monitor', 'deepspeed_monitor', 'sharded_checkpoint_saver', 'zero_memory_monitor'}
)
"""Callbacks that are left out of a run in plain Composer."""

LOGGERS = {
    'comet_ml': 'composer.loggers:CometMLLogger',
    'file': 'composer.loggers:FileLogger',
    'mlflow': 'composer.loggers:MLFlowLogger',
    'neptune': 'composer.loggers:NeptuneLogger',
    'remote_uploader_downloader': 'composer.loggers:RemoteUploaderDownloader',
    'slack': 'composer.loggers:SlackLogger',
    'tensorboard': 'composer.loggers:TensorboardLogger',
    'wandb': 'composer_ds.wandb_logger:WandBLogger',
}
