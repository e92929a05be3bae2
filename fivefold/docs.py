"""`python -m fivefold.docs`: writes the pages of docs/reference that are generated from code."""

from pathlib import Path

from fivefold.config.reference import reference_page
from fivefold.files import write_atomic

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "flags.md"

if __name__ == "__main__":
    write_atomic(PAGE, reference_page())
    print(PAGE)
