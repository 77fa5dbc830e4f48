from .run import main  # in a module of its own: a spawned process finds no function in a package's __main__

if __name__ == "__main__":
    main()
