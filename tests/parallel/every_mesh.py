"""Every option of the tiny models on every mesh of one, two and four ranks, against one rank: a line each.

python tests/parallel/every_mesh.py [OPTION ...]
"""

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "models")]

from crew import Crew  # noqa: E402
from families import meshes, tolerance, write  # noqa: E402
from scripted import alone, compare, serve  # noqa: E402
from tiny import OPTIONS  # noqa: E402

SEED = 5


def main() -> int:
    """0 if every mesh gives one rank's tokens."""
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        crew = Crew(4, Path(folder))
        for option in sys.argv[1:] or OPTIONS:
            write(option, Path(folder) / option)
            path = str(Path(folder) / option)
            want = alone(path, SEED)
            for mesh in meshes(option):
                try:
                    compare(want, crew.run(serve, path, mesh, SEED), mesh, tolerance(option))
                    said = "same"
                except AssertionError as error:
                    failed += 1
                    said = f"DIFFERS: {str(error).strip().splitlines()[-1]}"
                print(f"{option:20} {mesh!s:40} {said}", flush=True)
        crew.close()
    print(f"{failed} of them differ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
