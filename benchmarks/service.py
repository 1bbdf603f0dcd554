"""How fast the service answers with 100,000 finished trials, and MLflow beside it: see benchmarks/serving.py.

python benchmarks/service.py [--trials 100000] [--points 5000000] [--runs 5000] [--seconds 10]
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parent.parent)  # beside this file `import service` would find this file
    from benchmarks.serving import main

    sys.exit(main())
