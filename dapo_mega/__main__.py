"""`python -m dapo_mega COMMAND ...`."""

from dapo_mega.commands.main import main

if __name__ == "__main__":
    main()
