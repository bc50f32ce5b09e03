use memfit::tch::{Tensor, nn, nn::ModuleT};

/// Side of a picture.
const SIDE: i64 = 8;
const CLASSES: i64 = 10;

/// A ResNet (He et al., 2016) of three stages, for pictures of 8×8: 78,000 parameters.
#[derive(Debug)]
pub struct ResNet {
    stem: ConvNorm,
    blocks: [Block; 3],
    head: nn::Linear,
}

impl ResNet {
    pub fn new(vs: &nn::Path) -> Self {
        let blocks = vs / "blocks";
        Self {
            stem: ConvNorm::new(&(vs / "stem"), [1, 16], 3, 1),
            blocks: [
                Block::new(&(&blocks / 0), [16, 16], 1),
                Block::new(&(&blocks / 1), [16, 32], 2),
                Block::new(&(&blocks / 2), [32, 64], 2),
            ],
            head: nn::linear(vs / "head", 64, CLASSES, Default::default()),
        }
    }
}

impl ModuleT for ResNet {
    /// `[n, 64]` pixels become `[n, 10]` scores.
    fn forward_t(&self, pixels: &Tensor, train: bool) -> Tensor {
        let pictures = pixels.view([-1, 1, SIDE, SIDE]);
        let stem = self.stem.forward_t(&pictures, train).relu();
        let last = self.blocks.iter().fold(stem, |x, block| block.forward_t(&x, train));
        last.mean_dim([2_i64, 3].as_slice(), false, None).apply(&self.head)
    }
}

/// Two convolutions and a way around them, each followed by a `BatchNorm`.
#[derive(Debug)]
struct Block {
    first: ConvNorm,
    second: ConvNorm,
    /// Where the shape changes.
    around: Option<ConvNorm>,
}

impl Block {
    fn new(vs: &nn::Path, [from, to]: [i64; 2], stride: i64) -> Self {
        Self {
            first: ConvNorm::new(&(vs / "first"), [from, to], 3, stride),
            second: ConvNorm::new(&(vs / "second"), [to, to], 3, 1),
            around: (from != to).then(|| ConvNorm::new(&(vs / "around"), [from, to], 1, stride)),
        }
    }
}

impl ModuleT for Block {
    fn forward_t(&self, x: &Tensor, train: bool) -> Tensor {
        let inner = self.second.forward_t(&self.first.forward_t(x, train).relu(), train);
        match &self.around {
            Some(around) => (inner + around.forward_t(x, train)).relu(),
            None => (inner + x).relu(),
        }
    }
}

#[derive(Debug)]
struct ConvNorm {
    conv: nn::Conv2D,
    norm: nn::BatchNorm,
}

impl ConvNorm {
    fn new(vs: &nn::Path, [from, to]: [i64; 2], kernel: i64, stride: i64) -> Self {
        // A bias would go with the mean that the norm takes off.
        let config = nn::ConvConfig { stride, padding: kernel / 2, bias: false, ..Default::default() };
        Self {
            conv: nn::conv2d(vs / "conv", from, to, kernel, config),
            norm: nn::batch_norm2d(vs / "norm", to, Default::default()),
        }
    }
}

impl ModuleT for ConvNorm {
    fn forward_t(&self, x: &Tensor, train: bool) -> Tensor {
        self.norm.forward_t(&x.apply(&self.conv), train)
    }
}
