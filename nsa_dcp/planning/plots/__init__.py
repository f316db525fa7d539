"""Plots of what is planned and measured, for matplotlib, which is imported where something is drawn."""
