"""Which replicas to deploy for given tasks (L section 4.2 and Appendix A)."""
