from interlace.cli import main

main()
