"""``composer-ds report``: one HTML page about a run, from files, without an account."""
