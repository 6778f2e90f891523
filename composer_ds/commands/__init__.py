"""The subcommands of ``composer-ds``: their arguments and texts. Each hands over to a package of its own."""
