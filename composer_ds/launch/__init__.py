"""The launcher behind `run.py`: a YAML file and a command line become a Composer `Trainer`.

Modules, in the order in which a run meets them: `command_line` (arguments, exit codes), `config_file` (reading, origins
of values), `check` with `schema`, `arguments`, `registry` and `task` (everything that can be wrong, at once), `build`
(the objects), `job` (process group, training, closing). `ranks` says which rank speaks.
"""

from composer_ds.launch.command_line import main

__all__ = ['main']
