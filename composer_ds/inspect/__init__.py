"""What `composer-ds inspect` does: tell what a checkpoint is, and whether it is complete and undamaged.

`findings` looks, `report` shows.
"""
