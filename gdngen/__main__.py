"""``python -m gdngen``."""

from gdngen.cli import main

if __name__ == "__main__":
    main(prog_name="gdngen")
