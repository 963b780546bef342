import sys

from dlscale.experiments import main

sys.exit(main())
