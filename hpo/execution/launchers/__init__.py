"""How worker processes start: `local` is one as its supervisor sees it, the rest is how Python forks it."""
