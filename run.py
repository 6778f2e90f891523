"""Train as a YAML file says: `composer -n 8 run.py -f yamls/mt5.yaml`; `python run.py --help` tells more."""

import sys

from composer_ds.launch import main

if __name__ == '__main__':
    sys.exit(main())
