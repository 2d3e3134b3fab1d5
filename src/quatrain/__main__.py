"""`python -m quatrain`."""

from quatrain.cli import main

raise SystemExit(main())
