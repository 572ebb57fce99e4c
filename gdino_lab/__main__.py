"""python -m gdino_lab COMMAND ... is gdino-lab COMMAND ..."""

import sys

from gdino_lab.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
