import sys

from commkern.cli import main

sys.exit(main())
