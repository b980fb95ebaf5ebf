"""`python -m draftmill`. Guarded, since vLLM's workers import the main module again."""

from draftmill.cli import main

if __name__ == "__main__":
    main()
