"""What a model card asks to be cited: the papers whose systems trained the adapter, and the libraries it stands on."""

CITATION = r"""
## Citation

Trained with peft_mux, which realises the first two of these on the libraries of the others:

```bibtex
@article{muxtune,
  title = {{MuxTune}: Efficient Multi-Task {LLM} Fine-Tuning in Multi-Tenant Datacenters via Spatial-Temporal Backbone Multiplexing},
  author = {Chunyu Xue and Yi Pan and Weihao Cui and Quan Chen and Shulai Zhang and Bingsheng He and Minyi Guo},
  journal = {arXiv preprint arXiv:2603.02885},
  year = {2026}
}
@article{lobra,
  title = {{LobRA}: Multi-tenant Fine-tuning over Heterogeneous Data},
  author = {Sheng Lin and Fangcheng Fu and Haoyang Li and Hao Ge and Xuanyu Wang and Jiawen Niu and Yaofeng Tu and Bin Cui},
  journal = {Proceedings of the VLDB Endowment},
  volume = {18},
  number = {8},
  pages = {2616--2625},
  year = {2025},
  doi = {10.14778/3742728.3742752}
}
@misc{peft,
  title = {{PEFT}: State-of-the-art Parameter-Efficient Fine-Tuning methods},
  author = {Sourab Mangrulkar and Sylvain Gugger and Lysandre Debut and Younes Belkada and Sayak Paul and Benjamin Bossan and Marian Tietz},
  howpublished = {\url{https://github.com/huggingface/peft}},
  year = {2022}
}
@inproceedings{wolf-etal-2020-transformers,
  title = {Transformers: State-of-the-Art Natural Language Processing},
  author = {Thomas Wolf and Lysandre Debut and Victor Sanh and Julien Chaumond and Clement Delangue and others},
  booktitle = {Proceedings of the 2020 Conference on Empirical Methods in Natural Language Processing: System Demonstrations},
  pages = {38--45},
  year = {2020},
  url = {https://aclanthology.org/2020.emnlp-demos.6/}
}
```
"""  # noqa: E501
