use std::convert::Infallible;
use std::path::Path;

use memfit::tch::{Device, Kind, Tensor, nn, nn::Module, nn::ModuleT};
use memfit::{ActivationCheckpoint, CpuOffload};

/// The size of a model and of its batches.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    pub blocks: usize,
    pub heads: i64,
    pub width: i64,
    /// Bytes of text in one row.
    pub context: i64,
    /// Rows of one batch.
    pub batch: i64,
    pub dropout: f64,
}

impl Config {
    /// 6.5 million parameters, 4,096 bytes of text in a batch.
    pub fn reference() -> Self {
        Self { blocks: 8, heads: 8, width: 256, context: 256, batch: 16, dropout: 0.1 }
    }

    /// 0.24 million parameters, 256 bytes of text in a batch.
    pub fn small() -> Self {
        Self { blocks: 4, heads: 4, width: 64, context: 64, batch: 4, dropout: 0.1 }
    }
}

/// Which blocks drop their activations in forward and compute them again in backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recompute {
    Never,
    /// The first of every so many blocks; 1 is all of them.
    Every(usize),
}

impl Recompute {
    fn covers(self, block: usize) -> bool {
        matches!(self, Self::Every(n) if block.is_multiple_of(n.max(1)))
    }
}

/// A pre-norm GPT over bytes: learned positions, an untied head.
#[derive(Debug)]
pub struct Gpt {
    tokens: nn::Embedding,
    positions: Tensor,
    blocks: nn::SequentialT,
    norm: nn::LayerNorm,
    head: nn::Linear,
    context: i64,
}

impl Gpt {
    pub fn new(vs: &nn::Path, config: &Config, recompute: Recompute) -> Self {
        let Ok(gpt) = Self::assemble(vs, config, |blocks, index, block| -> Result<_, Infallible> {
            Ok(if recompute.covers(index) {
                blocks.add(ActivationCheckpoint::with_train(block).named(format!("block {index}")))
            } else {
                blocks.add(block)
            })
        });
        gpt
    }

    /// The weights of the blocks live in files in `folder` and visit memory.
    ///
    /// # Errors
    /// A folder that cannot be written to, a full disk.
    pub fn with_weights_in(
        vs: &nn::Path,
        config: &Config,
        recompute: Recompute,
        folder: &Path,
    ) -> memfit::Result<Self> {
        Self::assemble(vs, config, |blocks, index, block| {
            let weights = block.weights();
            let away = CpuOffload::parameters(block, &weights).with_train().disk(folder)?;
            Ok(if recompute.covers(index) {
                blocks.add(ActivationCheckpoint::with_train(away))
            } else {
                blocks.add(away)
            })
        })
    }

    fn assemble<E>(
        vs: &nn::Path,
        config: &Config,
        mut add: impl FnMut(nn::SequentialT, usize, Block) -> Result<nn::SequentialT, E>,
    ) -> Result<Self, E> {
        let width = config.width;
        let table = nn::EmbeddingConfig { ws_init: normal(), ..Default::default() };
        let tokens = nn::embedding(vs / "tokens", 256, width, table);
        let positions = vs.var("positions", &[config.context, width], normal());
        let mut blocks = nn::seq_t();
        for index in 0..config.blocks {
            blocks = add(blocks, index, Block::new(&(vs / "blocks" / index), config))?;
        }
        let norm = nn::layer_norm(vs / "norm", vec![width], Default::default());
        let unbiased = nn::LinearConfig { ws_init: normal(), bias: false, ..Default::default() };
        let head = nn::linear(vs / "head", width, 256, unbiased);
        Ok(Self { tokens, positions, blocks, norm, head, context: config.context })
    }

    /// Scores of the next byte, `[rows, length, 256]`, from bytes `[rows, length]`.
    pub fn logits(&self, bytes: &Tensor, train: bool) -> Tensor {
        let length = bytes.size().last().copied().unwrap_or_default();
        let embedded = self.tokens.forward(bytes) + self.positions.narrow(0, 0, length);
        self.blocks.forward_t(&embedded, train).apply(&self.norm).apply(&self.head)
    }

    /// Mean cross-entropy of the next bytes, in fp32 and nats.
    pub fn loss(&self, (bytes, next): &(Tensor, Tensor), train: bool) -> Tensor {
        let logits = self.logits(bytes, train).view([-1, 256]).to_kind(Kind::Float);
        logits.cross_entropy_for_logits(&next.view(-1))
    }

    /// Goes on writing after `prompt`, one drawn byte at a time.
    pub fn write(&self, prompt: &[u8], length: usize, device: Device) -> Vec<u8> {
        let _guard = memfit::tch::no_grad_guard();
        // One row is too little work to share.
        let threads = memfit::tch::get_num_threads();
        memfit::tch::set_num_threads(1);
        let mut text = prompt.to_vec();
        for _ in 0..length {
            let start = text.len().saturating_sub(self.context as usize);
            let seen: Vec<i64> = text[start..].iter().map(|byte| i64::from(*byte)).collect();
            let seen = Tensor::from_slice(&seen).to_device(device).unsqueeze(0);
            let scores = self.logits(&seen, false).select(1, -1).to_kind(Kind::Float);
            let drawn = (scores / 0.8).softmax(-1, Kind::Float).multinomial(1, true);
            text.push(drawn.int64_value(&[0, 0]) as u8);
        }
        memfit::tch::set_num_threads(threads);
        text.split_off(prompt.len())
    }
}

/// Attention and a feed-forward part, each added to what came in.
#[derive(Debug)]
struct Block {
    norm1: nn::LayerNorm,
    qkv: nn::Linear,
    out: nn::Linear,
    norm2: nn::LayerNorm,
    up: nn::Linear,
    down: nn::Linear,
    heads: i64,
    dropout: f64,
}

impl Block {
    fn new(vs: &nn::Path, config: &Config) -> Self {
        let width = config.width;
        let linear = |name: &str, inputs, outputs| {
            let config = nn::LinearConfig {
                ws_init: normal(),
                bs_init: Some(nn::Init::Const(0.0)),
                ..Default::default()
            };
            nn::linear(vs / name, inputs, outputs, config)
        };
        Self {
            norm1: nn::layer_norm(vs / "norm1", vec![width], Default::default()),
            qkv: linear("qkv", width, 3 * width),
            out: linear("out", width, width),
            norm2: nn::layer_norm(vs / "norm2", vec![width], Default::default()),
            up: linear("up", width, 4 * width),
            down: linear("down", 4 * width, width),
            heads: config.heads,
            dropout: config.dropout,
        }
    }

    /// The matrices.
    fn weights(&self) -> Vec<Tensor> {
        [&self.qkv, &self.out, &self.up, &self.down].map(|linear| linear.ws.shallow_clone()).into()
    }

    /// Takes its input, so that it can be dropped as soon as it was used: under autocast
    /// nobody else needs it in fp32.
    fn attention(&self, xs: Tensor) -> Tensor {
        let size = xs.size();
        let (rows, length, width) = (size[0], size[1], size[2]);
        let heads = |xs: &Tensor| xs.view([rows, length, self.heads, width / self.heads]).transpose(1, 2);
        let qkv = xs.apply(&self.qkv).split(width, 2);
        drop(xs);
        let (q, k, v) = (heads(&qkv[0]), heads(&qkv[1]), heads(&qkv[2]));
        let mask: Option<&Tensor> = None;
        let mixed = Tensor::scaled_dot_product_attention(&q, &k, &v, mask, 0.0, true, None, false);
        mixed.transpose(1, 2).reshape([rows, length, width]).apply(&self.out)
    }
}

impl ModuleT for Block {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Tensor {
        let xs = xs + self.attention(xs.apply(&self.norm1)).dropout(self.dropout, train);
        // The temporaries of a chain of calls live to the end of its statement, so it ends here.
        let raised = xs.apply(&self.norm2).apply(&self.up);
        let wide = raised.gelu("tanh");
        drop(raised);
        let fed = wide.apply(&self.down).dropout(self.dropout, train);
        xs + fed
    }
}

fn normal() -> nn::Init {
    nn::Init::Randn { mean: 0.0, stdev: 0.02 }
}
