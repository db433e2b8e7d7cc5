import sys

from ep_backend.deployment.engines.extract import main

main(sys.argv[1:])
