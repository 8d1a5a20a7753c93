"""Rows that compare answers: pairs of a chosen and a rejected one, answers with a verdict, and pairs to score."""
