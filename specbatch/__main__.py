"""`python -m specbatch`"""

from specbatch.cli import main

if __name__ == "__main__":
    main()
