from ep_backend.cli import main

main()
