"""`python -m relaxtune`: the command line, where no script is on the path."""

from relaxtune.pipeline.cli import main

if __name__ == "__main__":
    main()
