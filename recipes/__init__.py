"""Runnable tasks: one module per recipe (model, data and metrics), found by its name in the YAML of the launcher.

A recipe is a module with two pydantic models, ``ModelConfig`` and ``DataConfig``, and a function
``build(model, data)`` that returns a :class:`recipes.task.Task`. What a second recipe would share (the task, the
dataloaders, loading pretrained weights) sits in its own module; what belongs to one data set or one model carries its
name.
"""
