import sys

if sys.argv[1:2] == ["counters"]:
    from . import counters

    counters.main(sys.argv[2:])
else:
    from . import run

    run.main()
