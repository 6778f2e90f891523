"""Checking a run's values: every section against its model, all problems at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from composer_ds.errors import ConfigError
from composer_ds.launch import plugins, registry
from composer_ds.launch.arguments import Choice, arguments_model
from composer_ds.launch.config_file import ConfigFile, KeyPath
from composer_ds.launch.imports import load
from composer_ds.launch.problems import dotted, explain, shown, suggestion
from composer_ds.launch.schema import CheckpointConfig, DeepSpeedConfig, Layout, TrainConfig
from composer_ds.launch.task import Recipe, load_recipe

__all__ = ['RunConfig', 'check']

Model = TypeVar('Model', bound=BaseModel)

# Everything in the YAML is logged: no place for secrets.
_NOT_IN_YAML = {
    'params': "the launcher gives the model's parameters",
    'api_token': 'set NEPTUNE_API_TOKEN in the environment, because the configuration is logged',
    'slack_logging_api_key': 'set SLACK_LOGGING_API_KEY in the environment, because the configuration is logged',
}

# A key written without its section, as in `max_duration=1ep`, is answered with the full path.
_ELSEWHERE = {
    key: f'{section}.{key}'
    for section, model in (('train', TrainConfig), ('deepspeed', DeepSpeedConfig), ('checkpoint', CheckpointConfig))
    for key in model.model_fields
}


@dataclass
class RunConfig:
    """A run whose every value has been checked.

    Args:
        layout (Layout): Task, run name and seed.
        recipe (Recipe): The task's module.
        model (BaseModel): The recipe's ``ModelConfig``.
        data (BaseModel): The recipe's ``DataConfig``.
        optimizer (Choice): Class and arguments.
        scheduler (Choice | None): Class and arguments.
        train (TrainConfig): Arguments of the Trainer.
        deepspeed (DeepSpeedConfig | None): ``None`` trains with Composer's DDP.
        algorithms (list[Choice]): Classes and arguments; not `DeepSpeed`.
        callbacks (list[Choice]): Classes and arguments; without DeepSpeed not those that watch it.
        loggers (list[Choice]): Classes and arguments.
        checkpoint (CheckpointConfig): Arguments of the Trainer.
        left_out (list[str]): Callbacks that the YAML names and that are not made.
        resolved (dict[str, Any]): The whole configuration in plain values, for logging.
    """

    layout: Layout
    recipe: Recipe
    model: BaseModel
    data: BaseModel
    optimizer: Choice
    scheduler: Choice | None
    train: TrainConfig
    deepspeed: DeepSpeedConfig | None
    algorithms: list[Choice]
    callbacks: list[Choice]
    loggers: list[Choice]
    checkpoint: CheckpointConfig
    left_out: list[str]
    resolved: dict[str, Any]


def check(source: ConfigFile) -> RunConfig:
    """Checks all sections of a run.

    Called on every rank before the process group exists; imports the task and the classes that the run names.

    Args:
        source (ConfigFile): What `composer_ds.launch.config_file.read` returned.

    Returns:
        RunConfig: The checked run.

    Raises:
        ConfigError: With every problem found.
    """
    checker = _Checker(replace(source, values=_with_all_sections(source.values)))
    checker.problems += [
        f'{dotted(path)} ({source.origin(path)}): {reason}' for path, reason in source.unresolved.items()
    ]
    values = checker.source.values
    layout = checker.section(Layout, ())
    recipe = checker.recipe()
    model = checker.section(recipe.ModelConfig, ('model',)) if recipe else None
    data = checker.section(recipe.DataConfig, ('data',)) if recipe else None
    optimizer = checker.named('optimizer', registry.OPTIMIZERS, {'no_decay_on_norms_and_biases': (bool, False)})
    scheduler = checker.named('scheduler', registry.SCHEDULERS, {}) if values['scheduler'] is not None else None
    train = checker.section(TrainConfig, ('train',))
    deepspeed = checker.section(DeepSpeedConfig, ('deepspeed',)) if values['deepspeed'] is not None else None
    algorithms = checker.entries('algorithms', registry.ALGORITHMS)
    callbacks = checker.entries('callbacks', registry.CALLBACKS)
    loggers = checker.entries('loggers', registry.LOGGERS)
    checkpoint = checker.section(CheckpointConfig, ('checkpoint',))
    if checker.problems:
        raise ConfigError(checker.problems)
    # What is None without a problem does not exist: each None above left one behind.
    assert layout is not None and recipe is not None and model is not None and data is not None
    assert optimizer is not None and train is not None and checkpoint is not None
    left_out = [name for name in values['callbacks'] if deepspeed is None and name in registry.NEEDS_DEEPSPEED]
    callbacks = [choice for choice in callbacks if choice.section not in {f'callbacks.{name}' for name in left_out}]
    resolved = {
        **values,
        'callbacks': {name: given for name, given in values['callbacks'].items() if name not in left_out},
        'seed': layout.seed,
        'model': model.model_dump(mode='json'),
        'data': data.model_dump(mode='json'),
    }
    return RunConfig(
        layout=layout,
        recipe=recipe,
        model=model,
        data=data,
        optimizer=optimizer,
        scheduler=scheduler,
        train=train,
        deepspeed=deepspeed,
        algorithms=algorithms,
        callbacks=callbacks,
        loggers=loggers,
        checkpoint=checkpoint,
        left_out=left_out,
        resolved=resolved,
    )


def _with_all_sections(values: dict[str, Any]) -> dict[str, Any]:
    """Makes absent and empty sections explicit, and applies the switches of algorithms, callbacks and loggers.

    `name: null` and `name: true` mean default arguments; `name: false` switches an entry off.
    """
    values = {**values, **{name: values.get(name) for name in ('scheduler', 'deepspeed')}}
    for name in ('model', 'data', 'optimizer', 'train', 'checkpoint', 'algorithms', 'callbacks', 'loggers'):
        if values.get(name) is None:
            values[name] = {}
    for name in ('algorithms', 'callbacks', 'loggers'):
        if isinstance(values[name], dict):
            values[name] = {
                entry: {} if arguments is None or arguments is True else arguments
                for entry, arguments in values[name].items()
                if arguments is not False
            }
    return values


class _Checker:
    """Collects problems while it checks one section after another; a section with problems becomes ``None``."""

    def __init__(self, source: ConfigFile):
        self.source = source
        self.problems: list[str] = []
        self._names: dict[str, dict[str, str]] = {}

    def values_at(self, path: KeyPath) -> Any:
        values: Any = self.source.values
        for part in path:
            values = values[part]
        return values

    def section(self, model: type[Model], path: KeyPath) -> Model | None:
        given = self.values_at(path)
        if not isinstance(given, dict):
            return None  # the check of the top level reports it
        try:
            return model.model_validate(given)
        except ValidationError as error:
            self.problems += explain(error, model, path, self.source, _ELSEWHERE if path == () else None)
            return None

    def recipe(self) -> Recipe | None:
        name = self.source.values.get('task')
        if not isinstance(name, str):
            return None
        try:
            return load_recipe(name)
        except ConfigError as error:
            self.problems.append(f'task = {shown(name)} ({self.source.origin(("task",))}): {error}')
            return None

    def named(self, section: str, table: dict[str, str], own_keys: dict[str, Any]) -> Choice | None:
        """Checks a section that says by its key ``name`` which class it is about."""
        given = self.source.values[section]
        if not isinstance(given, dict) or (section, 'name') in self.source.unresolved:
            return None
        if 'name' not in given:
            origin = self.source.origin((section,))
            allowed = ', '.join(self.names(section, table))
            self.problems.append(
                f'{section}.name: required key is missing ({origin}). Allowed: {allowed}, or an import path '
                "'my_package.module:name'"
            )
            return None
        return self.choice((section,), given['name'], (section, 'name'), table, {'name': (str, ...), **own_keys})

    def entries(self, section: str, table: dict[str, str]) -> list[Choice]:
        """Checks a section that maps names of classes to their arguments."""
        given = self.source.values[section]
        names = given if isinstance(given, dict) else ()
        choices = [self.choice((section, name), name, (section, name), table, {}) for name in names]
        return [choice for choice in choices if choice]

    def names(self, section: Any, table: dict[str, str]) -> dict[str, str]:
        """The names of a section, those of other packages among them; a clash is told once."""
        if section not in self._names:
            self._names[section] = table
            try:
                self._names[section] = plugins.names(section, table)
            except ConfigError as error:
                self.problems += error.problems
        return self._names[section]

    def choice(
        self, path: KeyPath, name: Any, name_path: KeyPath, table: dict[str, str], own_keys: dict[str, Any]
    ) -> Choice | None:
        named = f'{dotted(name_path)} ({self.source.origin(name_path)})'
        table = self.names(path[0], table)
        if not isinstance(name, str) or (name not in table and ':' not in name):
            hint = "; your own: an import path 'my_package.module:name'"
            self.problems.append(f'{named}: unknown name {shown(name)}{suggestion(name, table)}{hint}')
            return None
        given = self.values_at(path)
        refused = [key for key in _NOT_IN_YAML if isinstance(given, dict) and key in given]
        for key in refused:
            origin = self.source.origin((*path, key))
            self.problems.append(f'{dotted((*path, key))} ({origin}): cannot be given here; {_NOT_IN_YAML[key]}')
        if refused:
            return None
        try:
            factory = load(table.get(name, name))
        except ConfigError as error:
            self.problems.append(f'{named}: {error}')
            return None
        checked = self.section(arguments_model(factory, own_keys, frozenset(_NOT_IN_YAML)), path)
        if checked is None:
            return None
        # Where `name` is one of our own keys it chose the class; elsewhere (W&B) it is an argument like any other.
        arguments = {key: getattr(checked, key) for key in checked.model_fields_set if key != 'name' or not own_keys}
        return Choice(dotted(path), factory, arguments)
