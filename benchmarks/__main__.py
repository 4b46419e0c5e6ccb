"""Every benchmark, one after another: `make bench`."""

from benchmarks import convert, step_speed


def main() -> None:
    """Runs them; each writes its own page."""
    step_speed.main()
    convert.main()


if __name__ == "__main__":
    main()
