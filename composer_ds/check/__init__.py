"""What `composer-ds check` finds out about a run or a ds_config before anything is trained.

`run_file` and `ds_config_file` read a file into a `Findings`, with the `facts` that a Trainer would know; `report` and
`plot` show it.
"""
